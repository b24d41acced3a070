package redact

import (
	"iter"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// privateKey matches keys. One whose end is missing may go on until the end of the text. The lines
// of a key can also be separated by \n in a string. Of a key whose beginning is missing, it matches
// the lines before the end.
var privateKey = regexp.MustCompile(`(?s)-{4,5} ?BEGIN [\w ]*(?:PRIVATE KEY|Static key).*?(?:-{4,5} ?END [\w ]*(?:PRIVATE KEY|Static key)[\w ]*-{4,5}|\z)|` +
	`(?:[\w+/]{16,}={0,2}[ \t]*(?:\r?\n|\\n)[ \t]*)*(?:[\w+/]+={0,2}[ \t]*(?:\r?\n|\\n)[ \t]*)?-----END [A-Z0-9 ]*PRIVATE KEY-----`)

// forms are what secrets look like in a line. What groups match is kept. A form matches no line
// without one of its hints, which is much faster to find out.
var forms = []struct {
	hints   []string
	pattern *regexp.Regexp
}{
	{[]string{"earer", "asic", "egotiate", "EARER", "ASIC"}, regexp.MustCompile(`(?i)((?:bearer|basic|negotiate)[ \t]+)[\w\-.~+/=]{8,}`)},
	// Names and passwords, or tokens, in URLs, whose slashes JSON may escape, and those of MySQL.
	{[]string{"@"}, regexp.MustCompile(`(:\\?/\\?/)[^\s"]+(@)`)},
	{[]string{"@tcp(", "@udp(", "@unix("}, regexp.MustCompile(`([\w.\-]+:)[^\s"'()]+(@(?:tcp|udp|unix)\()`)},
	// Names and passwords of curl, passwords in .netrc and in prose, and hashes of passwords.
	{[]string{"-u"}, regexp.MustCompile(`([ \t](?:-u|--user|--proxy-user)(?:=|[ \t]*)["']?[^\s:"'=]*:)[^\s"'()]+`)},
	{[]string{"ass", "ASS"}, regexp.MustCompile(`(?i)(pass(?:word|wd|phrase|code)["']?[ \t]+)[^\s=:].*`)},
	{[]string{"$"}, regexp.MustCompile(`\$[\w\-]+\$[^\s"':]{8,}`)},
}

// tokens matches JWTs, tokens by which nodes join, and those of issuers that may have no digits.
// They have minToken bytes at least, which are those of isToken.
var tokens = regexp.MustCompile(`eyJ[\w\-]{4,}\.[\w\-]+(?:\.[\w\-]*)*|(^|[^\w.\-])[a-z0-9]{6}\.[a-z0-9]{16}\b|` +
	`\b(?:(?:gh[a-z]|github_pat|npm|hf|shp[a-z]{2}|do[a-z]_v1|[spr]k|gl[a-z]{2,6}|pypi|xox[a-z]|xapp|hv[a-z]|ya29|SG|AGE-SECRET-KEY|\w{10,20}\.atlasv1)[\-_.]|` +
	`AIza|dapi|\d{8,10}:AA)[\w\-]{16,}(?:\.[\w\-]+)*`)

const minToken = 18

// withoutForms returns a text that is no JSON without secrets.
func withoutForms(s string) string {
	if strings.Contains(s, "PRIVATE KEY") || strings.Contains(s, "Static key") {
		s = privateKey.ReplaceAllString(s, LeftOut)
	}
	var out strings.Builder
	for line := range strings.SplitAfterSeq(s, "\n") {
		for _, f := range forms {
			if slices.ContainsFunc(f.hints, func(hint string) bool { return strings.Contains(line, hint) }) {
				line = f.pattern.ReplaceAllString(line, "${1}"+LeftOut+"${2}")
			}
		}
		out.WriteString(line)
	}
	s = replace(out.String(), isToken, minToken, func(_, word string) (string, bool) {
		left := tokens.ReplaceAllString(word, "${1}"+LeftOut)
		return left, left != word
	})
	return withoutNamed(withoutRandom(s))
}

// runs returns where the runs of bytes of a class are that are at least so long. They do not begin
// with what is a part of an escaped byte, as in \n, \u0026 and %3D.
func runs(s string, class func(c byte) bool, atLeast int) iter.Seq2[int, int] {
	return func(yield func(begin, end int) bool) {
		for end := 0; end < len(s); end++ {
			begin := end
			for end < len(s) && class(s[end]) {
				end++
			}
			switch {
			case begin > 0 && begin < end && s[begin-1] == '\\' && strings.IndexByte("nrt", s[begin]) >= 0:
				begin++
			case begin > 0 && begin+5 < end && s[begin-1] == '\\' && s[begin] == 'u':
				begin += 5
			case begin > 0 && begin+2 < end && s[begin-1] == '%':
				begin += 2
			}
			if end-begin >= atLeast && !yield(begin, end) {
				return
			}
		}
	}
}

// replace replaces runs by what with returns for them, if it returns true. It is also called with
// what is before the run and has not been replaced.
func replace(s string, class func(c byte) bool, atLeast int, with func(before, word string) (string, bool)) string {
	var out strings.Builder
	done := 0
	for begin, end := range runs(s, class, atLeast) {
		if left, ok := with(s[done:begin], s[begin:end]); ok {
			out.WriteString(s[done:begin] + left)
			done = end
		}
	}
	return out.String() + s[done:]
}

func isWord(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_'
}

// isName reports whether a byte can be in a name, isEncoded whether it can be in base64 of either
// alphabet, also in a URL, and isToken whether it can be in a token.
func isName(c byte) bool    { return isWord(c) || c == '-' || c == '.' }
func isEncoded(c byte) bool { return isWord(c) || strings.IndexByte("+/-%", c) >= 0 }
func isToken(c byte) bool   { return isName(c) || strings.IndexByte("+/~:=", c) >= 0 }

// These are how long a random text is at least, in bytes: of letters of both cases and digits by
// itself, of letters of one case and digits, and between other characters of base64. 256 bits are
// 43 letters in the alphabet of URLs.
const minRandom, minOneCase, minKey = 16, 32, 40

var (
	// capitals matches random capitals and digits. The names of kube-proxy's chains have fewer.
	capitals = regexp.MustCompile(`[A-Z][A-Z0-9]{19}`)
	// harmlessBefore are names whose values are random and no secrets.
	harmlessBefore = regexp.MustCompile(`(?:\bsha256|[dD]igests?|[vV]ersions?)\\*["']?[:=@][ \t]*\[?\\*["']?$`)
	// continued matches lines of base64 after what was random. The last one may be short.
	continued = regexp.MustCompile(`\x00={0,2}(?:(?:[ \t]*(?:\r?\n|\\n|\\r)+[ \t]*[\w+/\-]+={0,2})+([\r\n\\"']|$))?`)
)

// withoutRandom leaves out what looks random, with what it continues in the next lines.
func withoutRandom(s string) string {
	s = replace(s, isEncoded, minRandom, func(before, word string) (string, bool) {
		return "\x00", isRandom(word) && !harmlessBefore.MatchString(before[max(0, len(before)-32):])
	})
	return strings.ReplaceAll(continued.ReplaceAllString(s, "\x00${1}"), "\x00", LeftOut)
}

// isRandom reports whether a word looks random as a whole, or a segment of the path that it is, or
// one of the segment's parts. Names in Kubernetes do not.
func isRandom(word string) bool {
	if len(word) >= minKey && isMixed(word, len(word)/4) || capitals.MatchString(word) {
		return true
	}
	for segment := range strings.SplitSeq(word, "/") {
		if len(segment) >= minKey && isMixed(segment, 2) {
			return true
		}
		for part := range strings.FieldsFuncSeq(segment, func(c rune) bool { return strings.ContainsRune("+%_-", c) }) {
			if len(part) >= minRandom && isMixed(part, 2) || len(part) >= minOneCase && isMixed(strings.ToUpper(part)+"a", 1) {
				return true
			}
		}
	}
	return false
}

// isMixed reports whether a text has small letters, at least so many capitals, and digits.
func isMixed(s string, atLeast int) bool {
	var small, capital, digit int
	for _, c := range s {
		switch {
		case unicode.IsLower(c):
			small++
		case unicode.IsUpper(c):
			capital++
		case unicode.IsDigit(c):
			digit++
		}
	}
	return small > 0 && capital >= atLeast && digit > 0
}

var (
	// secretName matches the names of secrets, also in a longer word: some words anywhere in it, and
	// others at its end or as one of its parts.
	secretName = regexp.MustCompile(`(?i)token|passw|passphrase|passcode|pwd|secret|credential|signature|authorization|cookie|dockerc|csrf|assertion|session_?id|connection-?string|client-key-data|` +
		`(?:pass|psk|pw|creds?|jwt|otp|dsn|bearer|auth|[\w\-]keys?)$|(?:^|[_.\-])(?:pass|creds?|jwt|sig|pin)(?:$|[_.\-])`)
	// harmlessName matches names of files, objects and metrics, and of public keys.
	harmlessName = regexp.MustCompile(`(?i)(?:file|path|audiences?|name|accounts?|seconds|total|issuer|map|ref|reviews?)$|^slicecast_|(?:pub|public|topology)[\-_]?keys?$`)
	// harmlessValue matches values that are no secrets: truth values, short numbers, durations and
	// paths.
	harmlessValue = regexp.MustCompile(`^\\*["']?(?:true|false|null|nil|none|\d{1,5}|[\d.]+(?:ns|µs|ms|s|m|h)|` +
		`/(?:run|var/run|etc)/[\w./\-]*)\\*["']?(?:[\s,;&})\]]|$)`)
	// secretObject matches what says that an object is a Secret, and secretData its fields.
	secretObject = regexp.MustCompile(`(?:\b|\\n)kind\\*["']?[ \t]*:[ \t]*\\*["']?Secret(?:List)?\b`)
	secretData   = regexp.MustCompile(`(?i)^(?:string)?data$`)
	// separator matches what is between a name and its value: a sign, or the next field, which is the
	// value. flagValue matches what is between a flag and its value, which may be words of a list.
	separator = regexp.MustCompile(`^(?:\\*(?:["']|&(?:quot|apos|#3[49]);)?\]?[ \t]*(?::=|[=\-]>|={1,2}|:|>|%(?:25)*3[ADad]|\\u003[dD])[ \t]*|` +
		`\\*["']?(?:,?[ \t]*\\*["']?|[ \t]*\r?\n[ \t]*["']?|\\+n[ \t]*)[vV]alue\\*["']?[ \t]*[:=][ \t]*)`)
	flagValue = regexp.MustCompile(`^(?:[ \t]+|\\*["'],?[ \t]*\\*["'])([^\s\-]|-[^\s\-])`)
	// opens matches what begins a value of several lines.
	opens = regexp.MustCompile(`"""|'''`)
)

// isSecretName reports whether the values of a name are secrets.
func isSecretName(name string) bool {
	return secretName.MatchString(name) && !harmlessName.MatchString(name) && !slices.Contains(OwnFlags, strings.TrimLeft(name, "-"))
}

// IsSecret reports whether the value of a name is a secret, as far as one can tell by both.
func IsSecret(name, value string) bool {
	return isSecretName(name) || !strings.ContainsAny(value, " \t\n") && withoutRandom(value) != value
}

// withoutNamed leaves out what follows the names of secrets: the rest of the line, and the lines
// that belong to it.
func withoutNamed(s string) string {
	var out strings.Builder
	hasSecret := strings.Contains(s, "Secret") && secretObject.MatchString(s)
	known := make(map[string]bool) // most names are in a text many times
	done := 0                      // what is before it is in out or left out
	for begin, end := range runs(s, isName, 2) {
		name := s[begin:end]
		secret, ok := known[name]
		if !ok {
			secret = isSecretName(name) || hasSecret && secretData.MatchString(name)
			if len(known) < maxNames {
				known[name] = secret
			}
		}
		if !secret || begin < done {
			continue
		}
		value := end + len(separator.FindString(s[end:]))
		if m := flagValue.FindStringSubmatchIndex(s[end:]); value == end && name[0] == '-' && m != nil {
			value += m[2]
		}
		if value > end && !harmlessValue.MatchString(s[value:]) {
			out.WriteString(s[done:value] + LeftOut)
			done = valueEnd(s, value)
		}
	}
	return out.String() + s[done:]
}

// maxNames bounds how many names are remembered.
const maxNames = 1000

// valueEnd returns where a value ends that begins at i: after the line, and those further to the
// right, items of a list, and what the line opens.
func valueEnd(s string, i int) int {
	lineEnd := func(from int) int {
		if n := strings.IndexByte(s[from:], '\n'); n >= 0 {
			return from + n
		}
		return len(s)
	}
	blanks := func(text string) int { return len(text) - len(strings.TrimLeft(text, " \t")) }
	indent := blanks(s[strings.LastIndexByte(s[:i], '\n')+1:])
	end := lineEnd(i)
	if quote := opens.FindString(s[i:end]); quote != "" && strings.Count(s[i:end], quote) == 1 {
		closed := strings.Index(s[end:], quote)
		if closed < 0 {
			return len(s)
		}
		end = lineEnd(end + closed)
	}
	for next := end; next < len(s); {
		continues := s[next-1] == '\\' && next == end
		last := lineEnd(next + 1)
		line := s[next+1 : last]
		more := blanks(line)
		switch {
		case strings.TrimSpace(line) == "" && !continues:
		case continues, more > indent, more == indent && strings.HasPrefix(line[more:], "- "):
			end = last
		default:
			return end
		}
		next = last
	}
	return end
}
