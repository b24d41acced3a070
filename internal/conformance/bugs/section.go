package bugs

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
)

// intro is the beginning of the section.
//
//go:embed section.md
var intro string

// Section returns the section of docs/conformance.md.
func Section() (string, error) {
	list, err := Load()
	if err != nil {
		return "", err
	}
	results, err := LoadResults()
	if err != nil {
		return "", err
	}
	var out strings.Builder
	out.WriteString(intro)
	var areas []string
	for i := range list {
		if !slices.Contains(areas, list[i].Area) {
			areas = append(areas, list[i].Area)
		}
	}
	for _, area := range areas {
		fmt.Fprintf(&out, "\n### %s\n\n| bug | what went wrong | tested by | kube-proxy %s |\n| --- | --- | --- |%s\n",
			area, strings.Join(Versions, " | kube-proxy "), strings.Repeat(" --- |", len(Versions)))
		for i := range list {
			b := &list[i]
			if b.Area != area || b.Senseless != "" || b.Shared != "" {
				continue
			}
			fmt.Fprintf(&out, "| %s | %s | %s |", link(b.Number), b.What, tested(b))
			for _, version := range Versions {
				text, err := results.describe(b, version)
				if err != nil {
					return "", err
				}
				fmt.Fprintf(&out, " %s |", text)
			}
			out.WriteString("\n")
		}
	}
	out.WriteString("\n### Why kube-proxy is not run\n\n| bug | reason |\n| --- | --- |\n")
	for i := range list {
		if b := &list[i]; b.NotRun != "" {
			fmt.Fprintf(&out, "| %s: %s | %s |\n", link(b.Number), b.What, b.NotRun)
		}
	}
	out.WriteString("\n### Bugs that Slicecast shares\n\n| bug | what happens | why | tested by |\n| --- | --- | --- | --- |\n")
	for i := range list {
		b := &list[i]
		if b.Shared == "" {
			continue
		}
		// The cases require what happens, so a kube-proxy that fails does not do the same.
		for _, version := range Versions {
			if modes, err := results.fails(b, version); err != nil {
				return "", err
			} else if len(modes) > 0 {
				return "", fmt.Errorf("%s: kube-proxy %s does something else in %s: it is not shared", b.Number, version, modes)
			}
		}
		fmt.Fprintf(&out, "| %s | %s | %s | %s |\n", link(b.Number), b.What, b.Shared, tested(b))
	}
	out.WriteString("\n### Bugs that make no sense here\n\n| bug | what went wrong | why it makes no sense here |\n| --- | --- | --- |\n")
	for i := range list {
		if b := &list[i]; b.Senseless != "" {
			fmt.Fprintf(&out, "| %s | %s | %s |\n", link(b.Number), b.What, b.Senseless)
		}
	}
	return out.String(), nil
}

// describe returns the text for a kube-proxy's outcome.
func (r Results) describe(b *Bug, version string) (string, error) {
	if len(b.Cases) == 0 {
		return "not run", nil
	}
	modes, err := r.fails(b, version)
	if err != nil {
		return "", err
	}
	run := map[string]bool{}
	for _, variant := range b.variants() {
		run[modeOf(variant)] = true
	}
	text := "passes"
	switch len(modes) {
	case 0:
	case len(run):
		text = "**fails**"
	default:
		text = "**fails** in " + strings.Join(modes, " and ")
	}
	if note := b.Notes[version]; note != "" {
		if len(modes) == 0 {
			return "", fmt.Errorf("%s: kube-proxy %s passes, but has a note on how it fails", b.Number, version)
		}
		text += ", " + note
	}
	if slices.Contains(b.Only, ipvs) && !run[ipvs] {
		text += "; not run in ipvs"
	}
	return text, nil
}

func tested(b *Bug) string {
	var all []string
	for _, c := range b.Cases {
		all = append(all, "case `"+c.Name+"`")
	}
	for _, test := range b.Tests {
		all = append(all, "`"+test+"`")
	}
	text := strings.Join(all, ", ")
	if b.Only != nil {
		text += " (" + strings.Join(b.Only, ", ") + ")"
	}
	return text
}

// link returns a link to an issue, or a dash.
func link(number string) string {
	repository, issue, ok := strings.Cut(number, "#")
	if !ok {
		return "–"
	}
	text := strings.TrimPrefix(number, "kubernetes/kubernetes")
	return fmt.Sprintf("[%s](https://github.com/%s/issues/%s)", text, repository, issue)
}
