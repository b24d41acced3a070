package redact

import (
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

const (
	// minEncoded is how long a text in base64 is at least that is looked into, in bytes.
	minEncoded = 24
	// maxDepth bounds how often a text in base64 or quotes is decoded.
	maxDepth = 3
	// maxPath bounds the elements of a path, or words of a name, that are tried.
	maxPath = 16
)

// privateKeyCores are what the words PRIVATE KEY become in base64, by the number of bytes before
// them, without the characters to which bytes beside them contribute.
var privateKeyCores = cores("PRIVATE KEY")

// cores returns what a text becomes in base64 within something longer.
func cores(text string) (all []string) {
	for before := range 3 {
		core := base64.RawStdEncoding.EncodeToString(append(make([]byte, before), text...))
		first, last := (before*8+5)/6, len(core)
		if (before+len(text))%3 != 0 {
			last--
		}
		all = append(all, core[first:last])
	}
	return all
}

// withoutEncoded leaves out what is a private key in base64, in PEM or not, and other texts in
// base64 that have secrets. Such a text may go on in the following lines.
func (r *Redactor) withoutEncoded(s string, depth int) string {
	var out strings.Builder
	done := 0
	for i := 0; i < len(s); i++ {
		if !isEncoded(s[i]) {
			continue
		}
		if i > 0 && s[i-1] == '\\' && strings.IndexByte("nrt", s[i]) >= 0 {
			continue // an escaped end of line in a string
		}
		begin := i
		for i < len(s) && isEncoded(s[i]) {
			i++
		}
		begin, found := r.findEncoded(s, begin, i, depth)
		if !found {
			continue
		}
		out.WriteString(s[done:begin] + LeftOut)
		for i < len(s) && s[i] == '=' {
			i++
		}
		i = moreEncoded(s, i)
		done = i
	}
	if done == 0 {
		return s
	}
	out.WriteString(s[done:])
	return out.String()
}

// findEncoded returns where a text in base64 with secrets begins in s[begin:end], which has only
// characters of base64. As slashes and dashes are among them, the text may come after the elements
// of a path or the words of a name.
func (r *Redactor) findEncoded(s string, begin, end, depth int) (at int, found bool) {
	for range maxPath {
		if end-begin < minEncoded {
			break
		}
		if r.encodesSecret(s[begin:end], depth) {
			return begin, true
		}
		next := strings.IndexAny(s[begin:end], "/-_")
		if next < 0 {
			break
		}
		begin += next + 1
	}
	return 0, false
}

// moreEncoded returns where the lines of base64 end that follow i, which may be in a string.
func moreEncoded(s string, i int) int {
	for {
		next := i
		for next < len(s) && (s[next] == '\n' || s[next] == '\r' || isBlank(s[next])) {
			next++
		}
		if next == i {
			for next+1 < len(s) && s[next] == '\\' && (s[next+1] == 'n' || s[next+1] == 'r') {
				next += 2
			}
			next = blanks(s, next)
		} else if !strings.ContainsAny(s[i:next], "\r\n") {
			return i
		}
		end := next
		for end < len(s) && isEncoded(s[end]) {
			end++
		}
		for end < len(s) && s[end] == '=' {
			end++
		}
		ends := end == len(s) || strings.IndexByte("\r\n\\\"'", s[end]) >= 0
		if next == i || end == next || !ends {
			return i
		}
		i = end
	}
}

// encodesSecret reports whether a word is base64 of something that is or has a secret.
func (r *Redactor) encodesSecret(word string, depth int) bool {
	for _, core := range privateKeyCores {
		if strings.Contains(word, core) {
			return true
		}
	}
	encoding := base64.RawStdEncoding
	if strings.ContainsAny(word, "-_") {
		encoding = base64.RawURLEncoding
	}
	// Its end may be cut off.
	decoded, err := encoding.DecodeString(word[:len(word)/4*4])
	switch {
	case err != nil:
		return false
	case isPrivateKey(decoded):
		return true
	case depth == maxDepth || !utf8.Valid(decoded[:max(0, len(decoded)-utf8.UTFMax)]):
		return false
	}
	text := string(decoded)
	if strings.ContainsFunc(text, func(c rune) bool { return unicode.IsControl(c) && c != '\n' && c != '\r' && c != '\t' }) {
		return false
	}
	return r.text(text, depth+1) != text
}

// opensshKey is how private keys of OpenSSH begin.
const opensshKey = "openssh-key-v1\x00"

// isPrivateKey reports whether DER is that of a private key (RFC 5208, RFC 5915 and RFC 8017): a
// sequence that begins with a small number, its version. Certificates and public keys begin with a
// sequence or with a large number.
func isPrivateKey(der []byte) bool {
	if strings.HasPrefix(string(der), opensshKey) {
		return true
	}
	const sequence, integer = 0x30, 0x02
	if len(der) < 8 || der[0] != sequence {
		return false
	}
	length := 2 // that of the sequence's header
	if der[1] >= 0x80 {
		length += int(der[1] & 0x7f)
	}
	return length <= 5 && der[length] == integer && der[length+1] == 1 && der[length+2] <= 3
}

// withoutQuoted leaves secrets out of what the strings of JSON and Go in a text mean, which may
// have strings again. Each string ends in its line.
func (r *Redactor) withoutQuoted(s string, depth int) string {
	if depth == maxDepth || strings.IndexByte(s, '\\') < 0 {
		return s
	}
	var out strings.Builder
	done := 0
	for i := 0; i < len(s); i++ {
		if s[i] != '"' {
			continue
		}
		begin, escapes := i, false
		for i++; i < len(s) && s[i] != '"' && s[i] != '\n'; i++ {
			if s[i] == '\\' {
				escapes = true
				i++
			}
		}
		if !escapes || i >= len(s) || s[i] != '"' {
			continue
		}
		decoded, ok := unquote(s[begin : i+1])
		if !ok {
			continue
		}
		if left := r.text(decoded, depth+1); left != decoded {
			out.WriteString(s[done:begin] + quote(left))
			done = i + 1
		}
	}
	out.WriteString(s[done:])
	return out.String()
}

// unquote returns what a string of JSON or Go means.
func unquote(literal string) (out string, ok bool) {
	if json.Unmarshal([]byte(literal), &out) == nil {
		return out, true
	}
	out, err := strconv.Unquote(literal)
	return out, err == nil
}

// quote returns a string of JSON.
func quote(s string) string {
	var out strings.Builder
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(s) // a string can always be encoded
	return strings.TrimSuffix(out.String(), "\n")
}

// YAML returns an object as YAML without what may be secret in its strings. YAML folds long
// strings, so these are looked at before.
func (r *Redactor) YAML(object any) ([]byte, error) {
	text, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	return yaml.JSONToYAML([]byte(r.Text(string(text))))
}
