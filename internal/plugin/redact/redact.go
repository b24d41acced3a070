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
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// rule is what secrets look like, and what remains of them.
type rule struct {
	// hints are in lower case. Without one of them, the pattern does not match, which is much
	// faster to find out.
	hints   []string
	pattern *regexp.Regexp
	with    string
}

// privateKey matches keys. One whose end is missing may go on until the end of the text. The lines
// of a key can also be separated by \n in a string. Of a key whose beginning is missing, it matches
// the lines before the end.
var privateKey = regexp.MustCompile(`(?s)-{4,5} ?BEGIN [\w ]*(?:PRIVATE KEY|Static key).*?(?:-{4,5} ?END [\w ]*(?:PRIVATE KEY|Static key)[\w ]*-{4,5}|\z)|` +
	`(?:[\w+/]{16,}={0,2}[ \t]*(?:\r?\n|\\n)[ \t]*)*(?:[\w+/]+={0,2}[ \t]*(?:\r?\n|\\n)[ \t]*)?-----END [A-Z0-9 ]*PRIVATE KEY-----`)

// before matches where a word begins, also after an escaped end of line in a string.
const before = `(\\[nrt]|\b)`

var rules = []rule{
	{
		[]string{"authorization", "cookie"},
		regexp.MustCompile(`(?i)((?:proxy-)?authorization|(?:set-)?cookie)(["']?[ \t]*[:=][ \t]*)\[?["']?[^"'\r\n\]}]+`), "${1}${2}" + LeftOut,
	},
	{[]string{"eyj"}, regexp.MustCompile(`eyJ[\w-]{4,}\.[\w-]+(?:\.[\w-]*)*`), LeftOut},
	{
		[]string{"bearer", "basic", "negotiate"},
		regexp.MustCompile(`(?i)` + before + `(bearer|basic|negotiate)[ \t]+[\w\-.~+/=]{8,}`), "${1}${2} " + LeftOut,
	},
	// What is before the host is a name and a password, or a token. JSON may escape slashes.
	{[]string{":/", `:\/`}, regexp.MustCompile(`(:\\?/\\?/)[^\s"']+@`), "${1}" + LeftOut + "@"},
	// Signatures in URLs, as of Azure's storage, and URLs that are secret as a whole.
	{[]string{"sig="}, regexp.MustCompile(`([?&]sig=)[^&\s"'()]+`), "${1}" + LeftOut},
	{
		[]string{"hooks.slack.com", "webhook.office.com", "/api/webhooks/"},
		regexp.MustCompile(`((?:hooks\.slack\.com|webhook\.office\.com|/api/webhooks)/)[^\s"'()]+`), "${1}" + LeftOut,
	},
	// Names and passwords of curl and of MySQL.
	{
		[]string{"curl"},
		regexp.MustCompile(`(\bcurl\b[^\r\n]*?[ \t](?:-u|--user|--proxy-user)(?:=|[ \t]*)["']?[^\s:"']*:)[^\s"'()]+`), "${1}" + LeftOut,
	},
	{[]string{"@tcp(", "@unix(", "@udp("}, regexp.MustCompile(`([\w.\-]+:)[^\s"'()]+@(tcp|udp|unix)\(`), "${1}" + LeftOut + "@${2}("},
	// Private keys in JSON (RFC 7517), whose fields have short names.
	{[]string{"kty"}, regexp.MustCompile(`("(?:d|p|q|dp|dq|qi|k)\\*"[ \t]*:[ \t]*\\*")[\w\-]{16,}`), "${1}" + LeftOut},
}

// harmlessValue matches values that are no secrets: truth values, short numbers, durations and
// paths.
var harmlessValue = regexp.MustCompile(`^["']?(?:true|false|null|nil|none|\d{1,5}|[\d.]+(?:ns|µs|ms|s|m|h)|` +
	`/(?:run|var/run|etc)/[\w./\-]*)["']?$`)

// Text returns a text without secrets. The time that it takes is proportional to the text's length.
func (r *Redactor) Text(s string) string { return r.text(s, 0) }

// text returns a text without secrets that has been decoded so many times.
func (r *Redactor) text(s string, depth int) string {
	s = r.withoutQuoted(s, depth)
	// Keys come first: a part of a known value may be in the lines around them.
	if strings.Contains(s, "PRIVATE KEY") || strings.Contains(s, "Static key") {
		s = privateKey.ReplaceAllString(s, LeftOut)
	}
	s = r.withoutEncoded(r.withoutKnown(s), depth)
	lower := lowered(s)
	for _, rule := range rules {
		if slices.ContainsFunc(rule.hints, func(hint string) bool { return strings.Contains(lower, hint) }) {
			s = rule.pattern.ReplaceAllString(s, rule.with)
		}
	}
	return withoutBootstrapTokens(withoutNamed(withoutTokens(s)))
}

// lowered returns s with letters of ASCII in lower case, so that it has the same length.
func lowered(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// isName reports whether a byte can be in a name.
func isName(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '-' || c == '.'
}

// secretObject matches what says that an object is a Secret, in YAML and JSON, also in a string.
var secretObject = regexp.MustCompile(`(?:\b|\\n)kind\\*["']?[ \t]*:[ \t]*\\*["']?Secret(?:List)?\b`)

// secretFields are the fields of a Secret that have its values, in lower case.
var secretFields = []string{"data", "stringdata"}

// withoutNamed leaves out the values after names that secrets have. If there is a Secret in the
// text, it leaves out everything that may be the values of one.
func withoutNamed(s string) string {
	lower := lowered(s)
	words, says := candidates, suspect
	if secretObject.MatchString(s) {
		words = append(slices.Clone(words), "data") // which stringdata has, too
		says = func(name string) suspicion {
			if slices.Contains(secretFields, lowered(name)) {
				return strong
			}
			return suspect(name)
		}
	}
	var at []int // where candidates begin
	for _, word := range words {
		for i := 0; ; i++ {
			next := strings.Index(lower[i:], word)
			if next < 0 {
				break
			}
			i += next
			at = append(at, i)
		}
	}
	slices.Sort(at)
	says = remembered(says)
	var out strings.Builder
	done := 0 // what is before it is in out
	seen := 0 // where the last name ends
	for _, i := range at {
		if i < max(done, seen) {
			continue
		}
		begin, end := i, i
		for begin > max(done, i-maxName) && isName(s[begin-1]) {
			begin--
		}
		for end < min(len(s), i+maxName) && isName(s[end]) {
			end++
		}
		seen = end
		name := s[begin:end]
		switch {
		case begin > 0 && s[begin-1] == '\\' && strings.IndexByte("nrt", name[0]) >= 0:
			name = name[1:] // after an escaped end of line
		case begin > 0 && s[begin-1] == '%' && len(name) > 2:
			name = name[2:] // after an escaped byte in a URL
		}
		var v found
		switch says(name) {
		case strong:
			if v = valueAfter(s, begin, end); v.end > v.begin && harmlessValue.MatchString(s[v.begin:v.end]) {
				continue
			}
		case weak:
			v = randomAfter(s, end)
		}
		if v.end > v.begin {
			out.WriteString(s[done:v.begin] + v.instead)
			done = v.end
		}
	}
	out.WriteString(s[done:])
	return out.String()
}

// The lengths of the two parts of a token for bootstrapping nodes.
const bootstrapID, bootstrapSecret = 6, 16

// withoutBootstrapTokens leaves out tokens for bootstrapping nodes, which are two words of letters
// and digits with a dot in between.
func withoutBootstrapTokens(s string) string {
	isPart := func(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }
	ends := func(i int) bool { return i < 0 || i >= len(s) || !isName(s[i]) || i > 0 && s[i-1] == '\\' }
	var out strings.Builder
	done := 0
	for i := strings.IndexByte(s, '.'); i >= 0; {
		begin, end := i-bootstrapID, i+1+bootstrapSecret
		if begin >= done && end <= len(s) && ends(begin-1) && ends(end) &&
			!strings.ContainsFunc(s[begin:i]+s[i+1:end], func(r rune) bool { return r > 0x7f || !isPart(byte(r)) }) {
			out.WriteString(s[done:begin] + LeftOut)
			done = end
		}
		next := strings.IndexByte(s[i+1:], '.')
		if next < 0 {
			break
		}
		i += 1 + next
	}
	out.WriteString(s[done:])
	return out.String()
}

// words returns a command line without the words that follow flags for secrets.
func words(line []string) []string {
	for i := 1; i < len(line); i++ {
		if flag := line[i-1]; strings.HasPrefix(flag, "-") && !strings.Contains(flag, "=") && IsSecret(flag, line[i]) {
			line[i] = LeftOut
		}
	}
	return line
}

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
