// Package redact leaves secrets out of what goes into bug reports.
//
// Of objects it keeps what is in a list of harmless fields, flags and annotations, and nothing
// else; see keep.go. Texts, such as logs, have any form. So a Redactor leaves out of them what it
// was told and what looks like a secret or has the name of one. It rather leaves out too much.
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
)

// LeftOut stands for what was left out.
const LeftOut = "(left out)"

// minKnown and maxKnown bound the length of what is looked for, in bytes. What is shorter would be
// everywhere. Longer values are looked for in pieces, which bounds the time of looking for them.
const minKnown, maxKnown = 6, 256

// Redactor leaves secrets out of texts and objects. The zero value knows no values. Its methods may
// be called at any time.
type Redactor struct {
	mu       sync.Mutex // guards the fields below
	known    map[string]bool
	replacer *strings.Replacer // of known; nil if known has changed since
}

// Know makes the Redactor look for values, line by line, in the forms in which programs print them:
// as they are, in base64, and as parts of URLs and JSON. It also looks for what a value itself
// encodes in base64, and for the password in a URL.
func (r *Redactor) Know(values ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known == nil {
		r.known = make(map[string]bool)
	}
	r.replacer = nil
	for _, value := range values {
		r.know(value)
		encoded := strings.TrimRight(strings.TrimSpace(value), "=")
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			if decoded, err := encoding.DecodeString(encoded); err == nil {
				r.know(string(decoded))
			}
		}
		if u, err := url.Parse(value); err == nil && u.User != nil {
			password, _ := u.User.Password()
			r.know(cmp.Or(password, u.User.Username()))
		}
	}
}

// know adds the forms of a value's lines. The lines around keys in PEM are in all of them. The
// caller holds mu.
func (r *Redactor) know(value string) {
	for line := range strings.SplitSeq(value, "\n") {
		v := strings.TrimSpace(line)
		if len(v) < minKnown || strings.HasPrefix(v, "-----") && strings.HasSuffix(v, "-----") {
			continue
		}
		inJSON, _ := json.Marshal(v) // a string can be encoded
		quoted := strconv.Quote(v)
		whole := v[:len(v)/3*3] // whose encoding does not depend on what follows
		for _, form := range []string{
			v, url.QueryEscape(v), url.PathEscape(v), string(inJSON[1 : len(inJSON)-1]), quoted[1 : len(quoted)-1],
			base64.StdEncoding.EncodeToString([]byte(whole)), base64.URLEncoding.EncodeToString([]byte(whole)),
		} {
			for ; len(form) > 2*maxKnown; form = form[maxKnown:] {
				r.known[form[:maxKnown]] = true
			}
			r.known[form] = true
		}
	}
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

// Text returns a text without secrets. If it is JSON, or has lines that are, their strings are
// texts of their own. The time that it takes is proportional to the text's length.
func (r *Redactor) Text(s string) string {
	s = r.withoutKnown(colors.ReplaceAllString(s, ""))
	if out, ok := r.json(s); ok {
		return out
	}
	var out strings.Builder
	done, begin := 0, 0
	for line := range strings.SplitAfterSeq(s, "\n") {
		if left, ok := r.json(line); ok {
			out.WriteString(withoutForms(s[done:begin]) + left)
			done = begin + len(line)
		}
		begin += len(line)
	}
	out.WriteString(withoutForms(s[done:]))
	return out.String()
}

// colors matches what sets colors in terminals, which could be between a name and its value.
var colors = regexp.MustCompile(`\x1b\[[0-9;]*m`)

// json returns JSON without secrets, with sorted names, or false if a text is none. It is always
// encoded anew: if an object has a name twice, only one of the values was looked at.
func (r *Redactor) json(s string) (string, bool) {
	if s == "" || strings.IndexByte(`{["`, s[0]) < 0 {
		return "", false
	}
	decoder := json.NewDecoder(strings.NewReader(s))
	decoder.UseNumber()
	var value any
	if decoder.Decode(&value) != nil || decoder.Decode(new(any)) != io.EOF {
		return "", false
	}
	var out strings.Builder
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	text := strings.TrimRight(s, "\r\n")
	if strings.Contains(text, "\n") {
		encoder.SetIndent("", "  ")
	}
	_ = encoder.Encode(r.value("", value)) // what was decoded can be encoded
	return strings.TrimSuffix(out.String(), "\n") + s[len(text):], true
}

// value returns a value of JSON that has a name without secrets.
func (r *Redactor) value(name string, v any) any {
	switch v := v.(type) {
	case string:
		if randomName.MatchString(name) && randomValue.MatchString(v) {
			return v
		}
		return r.Text(v)
	case []any:
		for i := range v {
			v[i] = r.value(name, v[i])
			if flag, ok := v[max(i-1, 0)].(string); ok && i > 0 && strings.HasPrefix(flag, "-") && isSecretName(flag) {
				v[i] = LeftOut
			}
		}
	case map[string]any:
		if kind, _ := v["kind"].(string); kind == "Secret" || kind == "SecretList" {
			return LeftOut
		}
		ofSecret := false // its value is that of a secret, as in {"name": "TOKEN", "value": "x"}
		for _, value := range v {
			name, _ := value.(string)
			ofSecret = ofSecret || randomValue.MatchString(name) && isSecretName(name)
		}
		out := make(map[string]any, len(v))
		for key, value := range v {
			encoded, _ := json.Marshal(value)
			if (isSecretName(key) || ofSecret && strings.EqualFold(key, "value")) && !harmlessValue.Match(encoded) {
				value = LeftOut
			}
			out[r.Text(key)] = r.value(key, value)
		}
		return out
	}
	return v
}

// These are fields whose values are random and no secrets.
var (
	randomName  = regexp.MustCompile(`^(?:digests?|versions?)$`)
	randomValue = regexp.MustCompile(`^[\w+/=\-]*$`)
)
