// Package redact leaves secrets out of what goes into bug reports.
//
// Text may have any form: logs, JSON, YAML, command lines. So a Redactor looks for what secrets
// look like (tokens, private keys, credentials in URLs and headers), for values after names that
// secrets have, and for values that it was told. It rather leaves out too much. Objects of
// Kubernetes lose all values that could be anything, such as those of the environment.
package redact

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"io"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// LeftOut stands for what was left out.
const LeftOut = "(left out)"

// minKnown and maxKnown bound the length of what is looked for. What is shorter would be
// everywhere. Longer values are looked for in pieces, so that the time of looking for them is
// bounded.
const minKnown, maxKnown = 6, 256

// maxFrame is longer than a line that begins or ends a key in PEM.
const maxFrame = 64

// minCore is how long a part of an encoded value is at least to be looked for.
const minCore = 10

// Redactor leaves secrets out of texts. The zero value knows no values. Its methods may be called
// at any time.
type Redactor struct {
	mu       sync.Mutex // guards the fields below
	known    map[string]bool
	replacer *strings.Replacer // of known; nil if known has changed since
}

// Know makes the Redactor look for values, in the forms in which programs print them: as they are,
// in base64 (also as a part of something longer), and as parts of URLs and JSON. If a value is
// itself in base64, it looks for what is encoded, too. Of a value with several lines, it looks for
// each line.
func (r *Redactor) Know(values ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known == nil {
		r.known = make(map[string]bool)
	}
	r.replacer = nil
	for _, value := range values {
		r.know(value)
		if decoded, ok := decode(strings.TrimSpace(value)); ok {
			r.know(decoded)
		}
	}
}

// know adds the forms of a value. The caller holds mu.
func (r *Redactor) know(value string) {
	if len(strings.TrimSpace(value)) < minKnown {
		return
	}
	for _, v := range append(strings.Split(value, "\n"), value) {
		v = strings.TrimSpace(v)
		r.look(v, minKnown)
		r.look(url.QueryEscape(v), minKnown)
		r.look(url.PathEscape(v), minKnown)
		if quoted, err := json.Marshal(v); err == nil {
			r.look(string(quoted[1:len(quoted)-1]), minKnown)
		}
		quoted := strconv.Quote(v)
		r.look(quoted[1:len(quoted)-1], minKnown)
	}
	for _, v := range []string{value, strings.TrimSpace(value)} {
		for _, encoding := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
			r.look(encoding.EncodeToString([]byte(v)), minKnown)
			// What it becomes within something longer depends on how many bytes are before it. Of
			// its first and last characters, the bytes beside it determine a part.
			for before := range 3 {
				core := encoding.WithPadding(base64.NoPadding).EncodeToString(append(make([]byte, before), v...))
				first, last := (before*8+5)/6, len(core)
				if (before+len(v))%3 != 0 {
					last--
				}
				r.look(core[min(first, last):last], minCore)
			}
		}
	}
}

// look adds a text that is at least so long, in pieces if it is long. No piece is so short that it
// may be in other texts, and the lines around keys in PEM are in all of them. The caller holds mu.
func (r *Redactor) look(v string, atLeast int) {
	if strings.HasPrefix(v, "-----") && len(v) < maxFrame {
		return
	}
	for len(v) > 2*maxKnown {
		r.known[v[:maxKnown]] = true
		v = v[maxKnown:]
	}
	if len(v) >= atLeast {
		r.known[v] = true
	}
}

// decode returns what a value encodes in base64, if it does. Words of letters only may be anything.
func decode(value string) (string, bool) {
	value = strings.TrimRight(value, "=")
	if len(value) < 8 || !strings.ContainsAny(value, "0123456789+/-_") && strings.ToLower(value) == value {
		return "", false
	}
	for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		if decoded, err := encoding.DecodeString(value); err == nil {
			return string(decoded), true
		}
	}
	return "", false
}

// withoutKnown leaves out known values, the longest first, so that no part of a longer value
// remains.
func (r *Redactor) withoutKnown(s string) string {
	r.mu.Lock()
	if r.replacer == nil {
		all := slices.Collect(maps.Keys(r.known))
		slices.SortFunc(all, func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
		var pairs []string
		for _, v := range all {
			pairs = append(pairs, v, LeftOut)
		}
		r.replacer = strings.NewReplacer(pairs...)
	}
	replacer := r.replacer
	r.mu.Unlock()
	return replacer.Replace(s)
}

// privateKey matches keys. One whose end is missing may go on until the end of the text. The lines
// of a key can also be separated by \n in a string. Of a key whose beginning is missing, it matches
// the lines before the end.
var privateKey = regexp.MustCompile(`(?s)-{4,5} ?BEGIN [\w ]*(?:PRIVATE KEY|Static key).*?(?:-{4,5} ?END [\w ]*(?:PRIVATE KEY|Static key)[\w ]*-{4,5}|\z)|` +
	`(?:[\w+/]{16,}={0,2}[ \t]*(?:\r?\n|\\n)[ \t]*)*(?:[\w+/]+={0,2}[ \t]*(?:\r?\n|\\n)[ \t]*)?-----END [A-Z0-9 ]*PRIVATE KEY-----`)

// rules leave out what follows something other than a name. Without one of the hints, a pattern
// does not match, which is much faster to find out.
var rules = []struct {
	hints   []string
	pattern *regexp.Regexp
	with    string
}{
	{[]string{"earer", "asic", "egotiate", "EARER", "ASIC"}, regexp.MustCompile(`(?i)((?:\\[nrt]|\b)(?:bearer|basic|negotiate))[ \t]+[\w\-.~+/=]{8,}`), "${1} " + LeftOut},
	// What is before the host is a name and a password, or a token. JSON may escape slashes.
	{[]string{"://", `:\/`}, regexp.MustCompile(`(:\\?/\\?/)[^\s"']+@`), "${1}" + LeftOut + "@"},
	// URLs that are secret as a whole.
	{[]string{"hooks.slack.com/", "webhook.office.com/", "/api/webhooks/"}, regexp.MustCompile(`((?:hooks\.slack\.com|webhook\.office\.com|/api/webhooks)/)[^\s"'()]+`), "${1}" + LeftOut},
	// Names and passwords of curl and of MySQL.
	{[]string{"curl"}, regexp.MustCompile(`(\bcurl\b[^\r\n]*?[ \t](?:-u|--user|--proxy-user)(?:=|[ \t]*)["']?[^\s:"']*:)[^\s"'()]+`), "${1}" + LeftOut},
	{[]string{"@tcp(", "@udp(", "@unix("}, regexp.MustCompile(`([\w.\-]+:)[^\s"'()]+@(tcp|udp|unix)\(`), "${1}" + LeftOut + "@${2}("},
	// Passwords of .netrc, and hashes of passwords.
	{[]string{"login"}, regexp.MustCompile(`(\blogin[ \t]+\S+[ \t]+(?:password|account)[ \t]+)[^\s(]\S*`), "${1}" + LeftOut},
	{[]string{"$"}, regexp.MustCompile(`\$(?:1|2[abxy]?|5|6|7|y|apr1|argon2\w*|pbkdf2[\w\-]*|scrypt)\$[^\s"':]{8,}`), LeftOut},
	// Private keys in JSON (RFC 7517), whose fields have short names.
	{[]string{"kty"}, regexp.MustCompile(`("(?:d|p|q|dp|dq|qi|k)\\*"[ \t]*:[ \t]*\\*")[\w\-]{16,}`), "${1}" + LeftOut},
}

// harmlessValue matches values that are no secrets: truth values, short numbers, durations and
// paths.
var harmlessValue = regexp.MustCompile(`^\\*["']?(?:true|false|null|nil|none|\d{1,5}|[\d.]+(?:ns|µs|ms|s|m|h)|` +
	`/(?:run|var/run|etc)/[\w./\-]*)\\*["']?(?:[\s,;&})\]]|$)`)

// Text returns a text without secrets. It leaves out values that are known, keys and tokens by
// their form, and what is after the name of a secret, to the end of the line and in the lines that
// belong to it. In JSON, it is the value of the name. The time that it takes is proportional to the
// text's length.
func (r *Redactor) Text(s string) string { return r.text(s, 0) }

// maxDepth bounds how often a text within JSON within JSON is decoded.
const maxDepth = 3

// text returns a text without secrets that has been decoded so many times.
func (r *Redactor) text(s string, depth int) string {
	s = r.withoutKnown(s)
	if out, ok := r.json(s, false, depth); ok {
		return out
	}
	if strings.Contains(s, "PRIVATE KEY") || strings.Contains(s, "Static key") {
		s = privateKey.ReplaceAllString(s, LeftOut)
	}
	return r.withoutNamed(withoutTokens(s), depth)
}

// json returns JSON without secrets, or false if a text is none. With typed, the names are those of
// Kubernetes' types, of which no object or list is a secret.
func (r *Redactor) json(s string, typed bool, depth int) (string, bool) {
	if trimmed := strings.TrimSpace(s); depth == maxDepth || trimmed == "" || strings.IndexByte(`{["`, trimmed[0]) < 0 {
		return "", false
	}
	decoder := json.NewDecoder(strings.NewReader(s))
	decoder.UseNumber()
	var value any
	if decoder.Decode(&value) != nil || decoder.Decode(new(any)) != io.EOF {
		return "", false
	}
	changed := false
	value = r.value(value, secretObject.MatchString(s), typed, depth, &changed)
	if !changed {
		return s, true
	}
	var out strings.Builder
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if strings.Contains(s, "\n") {
		encoder.SetIndent("", "  ")
	}
	_ = encoder.Encode(value) // what was decoded can be encoded
	if !strings.HasSuffix(s, "\n") {
		return strings.TrimSuffix(out.String(), "\n"), true
	}
	return out.String(), true
}

// value returns a value of JSON without secrets, and sets changed if it had some. secret means that
// there is a Secret in the text, whose data are secrets.
func (r *Redactor) value(v any, secret, typed bool, depth int, changed *bool) any {
	text := func(s string) string {
		out := r.text(s, depth+1)
		*changed = *changed || out != s
		return out
	}
	switch v := v.(type) {
	case string:
		return text(v)
	case []any:
		for i := range v {
			v[i] = r.value(v[i], secret, typed, depth, changed)
		}
	case map[string]any:
		name, _ := v["name"].(string)
		out := make(map[string]any, len(v))
		for key, value := range v {
			_, isText := value.(string)
			of := key
			if key == "value" && name != "" {
				of = name
			}
			isSecret := isSecretName(of) || secret && slices.Contains(secretFields, strings.ToLower(of))
			encoded, err := json.Marshal(value)
			harmless := typed && !isText || value == LeftOut || err == nil && harmlessValue.Match(encoded)
			if isSecret && !harmless {
				*changed = true
				value = LeftOut
			} else if !slices.Contains(randomFields, key) || !randomValue.Match(encoded) {
				value = r.value(value, secret, typed, depth, changed)
			}
			out[text(key)] = value
		}
		return out
	}
	return v
}

// randomFields are fields whose values are random and no secrets. randomValue matches them in JSON.
var (
	randomFields = []string{"digest", "digests", "version", "versions", "hash", "uid"}
	randomValue  = regexp.MustCompile(`^[\["][\w+/=\-",]*[\]"]$`)
)

// YAML returns an object of Kubernetes' types as YAML without secrets.
func (r *Redactor) YAML(object any) ([]byte, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	left, ok := r.json(r.withoutKnown(string(text)), true, 0)
	if !ok {
		left = r.Text(string(text))
	}
	return yaml.JSONToYAML([]byte(left))
}

// secretObject matches what says that an object is a Secret, in YAML and JSON, also in a string.
var secretObject = regexp.MustCompile(`(?:\b|\\n)kind\\*["']?[ \t]*:[ \t]*\\*["']?Secret(?:List)?\b`)

// secretFields are the fields of a Secret that have its values, in lower case.
var secretFields = []string{"data", "stringdata"}

// withoutNamed leaves out what follows the names of secrets: the rest of the line, and the lines
// that are further to the right, or items of a list. Lines that are JSON lose only values.
func (r *Redactor) withoutNamed(s string, depth int) string {
	says := remembered(secretObject.MatchString(s))
	var out strings.Builder
	below := -1           // lines that are further to the right than this are left out
	expectsValue := false // the line before ends with the name of a secret as a value
	until := ""           // if it is not empty, lines are left out up to the one that has it
	for line := range strings.SplitAfterSeq(s, "\n") {
		text := strings.TrimRight(line, "\r\n")
		content := strings.TrimLeft(text, " \t")
		indent := len(text) - len(content)
		switch {
		case until == `\`:
			if !strings.HasSuffix(text, until) {
				until = ""
			}
			continue
		case until != "":
			if strings.Contains(text, until) {
				until = ""
			}
			continue
		case below >= 0 && content == "":
		case below >= 0 && (indent > below || indent == below && strings.HasPrefix(content, "- ")):
			continue
		case expectsValue && valueLine.MatchString(content):
			continue
		default:
			below = -1
		}
		expectsValue = false
		if left, ok := r.json(text, false, depth); ok && left != "" {
			out.WriteString(left + line[len(text):])
			continue
		}
		left := text
		for _, rule := range rules {
			if slices.ContainsFunc(rule.hints, func(hint string) bool { return strings.Contains(left, hint) }) {
				left = rule.pattern.ReplaceAllString(left, rule.with)
			}
		}
		line, text = left+line[len(text):], left
		cut, ends := named(text, says)
		if cut < 0 {
			out.WriteString(line)
			expectsValue = ends
			continue
		}
		out.WriteString(text[:cut] + LeftOut + line[len(text):])
		below = indent
		if m := opens.FindString(text[cut:]); m != "" && strings.Count(text[cut:], m) == 1 {
			until = m
		}
	}
	return out.String()
}

// opens matches what begins a value of several lines: three quotes, or a backslash at the end.
var opens = regexp.MustCompile("\"\"\"|'''|\\\\$")

// valueLine matches a line with the value that belongs to the name in the line before.
var valueLine = regexp.MustCompile(`^["']?value["']?[ \t]*[:=]`)

// These match what is between the name of a secret and its value: a sign; the next field, which is
// the value; and the end of the name's element in XML.
var (
	separator  = regexp.MustCompile(`^\\*(?:["']|&(?:quot|apos|#3[49]);)?\]?[ \t]*(?::=|=>|={1,2}|:|%3D|%3A)[ \t]*`)
	valueField = regexp.MustCompile(`^\\*["']?(?:,?[ \t]*\\*["']?|\\+n[ \t]*)value\\*["']?[ \t]*[:=][ \t]*`)
)

// remembered returns isSecretName, which also knows the fields of a Secret if there is one, and
// keeps its answers: most names of a text are in it many times.
func remembered(secret bool) func(name string) bool {
	known := make(map[string]bool)
	return func(name string) bool {
		is, ok := known[name]
		if !ok {
			is = isSecretName(name) || secret && slices.Contains(secretFields, strings.ToLower(name))
			if len(known) < maxNames {
				known[name] = is
			}
		}
		return is
	}
}

// named returns where in a line the value of the first name of a secret begins, or -1 if there is
// none. Then it also reports whether the line ends with such a name.
func named(line string, isSecret func(name string) bool) (cut int, ends bool) {
	for begin := 0; begin < len(line); begin++ {
		if !isName(line[begin]) {
			continue
		}
		end := begin
		for end < len(line) && isName(line[end]) {
			end++
		}
		name := line[max(begin, end-maxName):end]
		switch {
		case begin > 0 && line[begin-1] == '\\' && strings.IndexByte("nrt", name[0]) >= 0:
			name = name[1:] // after an escaped end of line
		case begin > 0 && line[begin-1] == '%' && len(name) > 2:
			name = name[2:] // after an escaped byte in a URL
		}
		if isSecret(name) {
			if cut := valueAfter(line, begin, end); cut >= 0 && !harmlessValue.MatchString(line[cut:]) {
				return cut, false
			}
			ends = strings.TrimLeft(line[end:], `\"', `) == ""
		}
		begin = end
	}
	return -1, ends
}

// valueAfter returns where the value of a name begins, or -1 if it has none in this line.
func valueAfter(line string, begin, end int) int {
	rest := line[end:]
	for _, between := range []*regexp.Regexp{separator, valueField} {
		if m := between.FindString(rest); m != "" {
			return end + len(m)
		}
	}
	if begin > 0 && line[begin-1] == '<' && strings.HasPrefix(rest, ">") {
		return end + 1
	}
	if value := blanks(line, end); line[begin] == '-' && value > end && !strings.HasPrefix(line[value:], "--") {
		return value // the next word is a flag's value, unless it is the next flag
	}
	return -1
}

// isName reports whether a byte can be in a name.
func isName(c byte) bool { return isWord(c) || strings.IndexByte("_-.", c) >= 0 }

// Pod removes from a Pod what may be secret, and makes the Redactor look for the values of the
// environment elsewhere. main is the container whose command line is kept.
func (r *Redactor) Pod(p *corev1.Pod, main string) *corev1.Pod {
	p = p.DeepCopy()
	r.Meta(&p.ObjectMeta)
	r.Spec(&p.Spec, main)
	return p
}

// Spec removes from a Pod's specification what may be secret; see Pod.
func (r *Redactor) Spec(s *corev1.PodSpec, main string) {
	for _, list := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range list {
			c := &list[i]
			if c.Name == main {
				c.Args = commandLine(c.Args, len(c.Command) == 0)
				c.Command = commandLine(c.Command, true)
			} else {
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
// which field. It makes the Redactor look elsewhere for the values of annotations with names that
// secrets have, and for what is in base64. Others may be words that are everywhere.
func (r *Redactor) Meta(m *metav1.ObjectMeta) {
	m.ManagedFields = nil
	for name, value := range m.Annotations {
		if strings.HasPrefix(name, ownAnnotations) {
			continue
		}
		if decoded, ok := decode(value); IsSecret(name, value) || ok && len(decoded) >= minDecoded {
			r.Know(value)
		}
		m.Annotations[name] = LeftOut
	}
}

// minDecoded is how long a value of an annotation is at least, decoded, to be looked for.
const minDecoded = 16
