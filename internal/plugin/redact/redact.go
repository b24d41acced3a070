// Package redact leaves secrets out of what goes into bug reports.
//
// Text may have any form: logs, JSON, YAML, command lines. So a Redactor looks for what secrets look
// like (tokens, private keys, credentials in URLs and headers), for values after names that secrets
// have, and for values that it was told. It rather leaves out too much. Objects of Kubernetes lose
// all values that could be anything, such as those of the environment.
package redact

import (
	"encoding/base64"
	"regexp"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// LeftOut stands for what was left out.
const LeftOut = "(left out)"

// minKnown is how long a value is at least to be looked for. Shorter ones would be everywhere.
const minKnown = 6

// Redactor leaves secrets out of texts. The zero value knows no values. Its methods may be called
// at any time.
type Redactor struct {
	mu    sync.Mutex // guards known
	known map[string]bool
}

// Know makes the Redactor look for values, as they are and in base64. Of a value with several lines,
// it looks for each line.
func (r *Redactor) Know(values ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known == nil {
		r.known = make(map[string]bool)
	}
	for _, value := range values {
		for _, v := range append(strings.Split(value, "\n"), base64.StdEncoding.EncodeToString([]byte(value))) {
			if v = strings.TrimSpace(v); len(v) >= minKnown {
				r.known[v] = true
			}
		}
	}
}

// knownPairs returns the values with what stands for them, the longest first, so that no part of a
// longer value remains.
func (r *Redactor) knownPairs() (pairs []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for v := range r.known {
		all = append(all, v)
	}
	slices.SortFunc(all, func(a, b string) int { return len(b) - len(a) })
	for _, v := range all {
		pairs = append(pairs, v, LeftOut)
	}
	return pairs
}

// rule is what secrets look like, and what remains of them.
type rule struct {
	pattern *regexp.Regexp
	with    string
}

var rules = []rule{
	// A key whose end is missing may go on until the end of the text. The lines of a key can also be
	// separated by \n in a string.
	{regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY.*?(-----END [A-Z0-9 ]*PRIVATE KEY-----|\z)`), LeftOut},
	{regexp.MustCompile(`(?i)((?:proxy-)?authorization|(?:set-)?cookie)(["']?[ \t]*[:=][ \t]*)\[?["']?[^"'\r\n\]}]+`), "${1}${2}" + LeftOut},
	{regexp.MustCompile(`eyJ[\w-]{4,}\.[\w-]+(?:\.[\w-]*)*`), LeftOut},
	{regexp.MustCompile(`(?i)\b(bearer|basic|negotiate)[ \t]+[\w\-.~+/=]{8,}`), "${1} " + LeftOut},
	{regexp.MustCompile(`(://)[^/\s:@"']*:[^/\s@"']+@`), "${1}" + LeftOut + "@"},
	// Tokens of OpenShift, GitHub, Slack, AWS, and for bootstrapping nodes.
	{regexp.MustCompile(`\b(?:sha256~[\w-]{20,}|gh[pousr]_\w{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|[a-z0-9]{6}\.[a-z0-9]{16})\b`), LeftOut},
}

// secretName is part of the names of secrets.
const secretName = `(?:token|passw(?:or)?d|passphrase|secret|credential|api[_-]?key|private[_-]?key|access[_-]?key|` +
	`client-key-data|dockerconfigjson|dockercfg)`

// named are values after names that secrets have, as after flags: the name, what is in between, and
// the value.
var named = []*regexp.Regexp{
	regexp.MustCompile(`(?i)([\w.\-]*` + secretName + `[\w.\-]*|\bauth)(\\?["']?[ \t]*[:=][ \t]*)("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',;}\]]+)`),
	regexp.MustCompile(`(?i)(--[\w.\-]*` + secretName + `[\w.\-]*)([ \t]+)("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"',;}\]\-][^\s"',;}\]]*)`),
}

// secretFlag matches a flag whose value, if it is a secret, is the next word.
var secretFlag = regexp.MustCompile(`(?i)^--?[\w.\-]*` + secretName + `[\w.\-]*$`)

// harmlessName matches names of what is no secret, although a part of the name says so: files,
// names of objects, and numbers of metrics.
var harmlessName = regexp.MustCompile(`(?i)(?:file|path|audiences?|name|account|accounts|seconds|total|issuer|map|-secret|secretRef|secretKeyRef|reviews?)$`)

// harmlessValue matches values that are no secrets: truth values, short numbers, durations and
// paths.
var harmlessValue = regexp.MustCompile(`^["']?(?:true|false|null|nil|none|\d{1,5}|[\d.]+(?:ns|µs|ms|s|m|h)|/(?:run|var/run|etc)/[\w./\-]*|` +
	`\(left)["']?$`)

// Text returns a text without secrets.
func (r *Redactor) Text(s string) string {
	if pairs := r.knownPairs(); len(pairs) > 0 {
		s = strings.NewReplacer(pairs...).Replace(s)
	}
	for _, rule := range rules {
		s = rule.pattern.ReplaceAllString(s, rule.with)
	}
	for _, pattern := range named {
		s = pattern.ReplaceAllStringFunc(s, func(match string) string { return withoutValue(pattern, match) })
	}
	return s
}

// withoutValue returns a match of one of named without its value, unless that is harmless.
func withoutValue(pattern *regexp.Regexp, match string) string {
	parts := pattern.FindStringSubmatch(match)
	if harmlessName.MatchString(parts[1]) || harmlessValue.MatchString(parts[3]) {
		return match
	}
	quote := ""
	if q := parts[3][:1]; q == `"` || q == "'" {
		quote = q
	}
	return parts[1] + parts[2] + quote + LeftOut + quote
}

// words returns a command line without the words that follow flags for secrets.
func words(line []string) []string {
	for i := 1; i < len(line); i++ {
		if secretFlag.MatchString(line[i-1]) && !harmlessName.MatchString(line[i-1]) {
			line[i] = LeftOut
		}
	}
	return line
}

// Pod removes from a Pod what may be secret, and makes the Redactor look for the values of the
// environment elsewhere. main is the container whose command line is kept.
func (r *Redactor) Pod(p *corev1.Pod, main string) *corev1.Pod {
	p = p.DeepCopy()
	Meta(&p.ObjectMeta)
	r.Spec(&p.Spec, main)
	return p
}

// Spec removes from a Pod's specification what may be secret; see Pod.
func (r *Redactor) Spec(s *corev1.PodSpec, main string) {
	for _, list := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range list {
			c := &list[i]
			c.Command, c.Args = words(c.Command), words(c.Args)
			if c.Name != main {
				// Nothing is known of the command lines of others.
				c.Command, c.Args = leaveOut(c.Command), leaveOut(c.Args)
			}
			for n := range c.Env {
				if e := &c.Env[n]; e.Value != "" {
					r.Know(e.Value)
					e.Value = LeftOut
				}
			}
			c.LivenessProbe, c.ReadinessProbe, c.StartupProbe, c.Lifecycle = nil, nil, nil, nil
		}
	}
	s.EphemeralContainers = nil
}

func leaveOut(words []string) []string {
	if len(words) == 0 {
		return nil
	}
	return []string{LeftOut}
}

// ownAnnotations begin the names of the annotations that are kept.
const ownAnnotations = "slicecast.io/"

// Meta removes from an object's metadata what may be secret: the values of annotations, and who set
// which field.
func Meta(m *metav1.ObjectMeta) {
	m.ManagedFields = nil
	for name := range m.Annotations {
		if !strings.HasPrefix(name, ownAnnotations) {
			m.Annotations[name] = LeftOut
		}
	}
}
