package redact

import (
	"regexp"
	"strings"
)

// tokenForms are what tokens of some issuers look like, whatever is before them. Most others are
// found by withoutRandom.
var tokenForms = []*regexp.Regexp{
	regexp.MustCompile(`eyJ[\w-]{4,}\.[\w-]+(?:\.[\w-]*)*`),
	regexp.MustCompile(`\b(?:(?:gl[a-z]{2,6}|pul|PMAK|NRAK|tskey-[a-z]+|sk(?:-[a-z]+(?:\d+-)?)?|pypi|ico|pplx|xkeysib|p8e|GOCSPX)-|` +
		`(?:gh[a-z]|github_pat|npm|rubygems|dckr_[a-z]+|do[a-z]_v\d|hf|lin_api|sntry[a-z]|shp[a-z]{2}|[sr]k_(?:live|test|prod)|gl[a-z]{1,2}|sgp|fm\d[a-z]?|fo\d|` +
		`pscale_[a-z]+|pnu|rdme|duffel_[a-z]+|shippo_[a-z]+|(?i:clojars))_|dapi|AKCp)[\w\-]{16,}(?:\.[\w\-]+)*`),
	regexp.MustCompile(`\b(?:(?:hv[a-z]|ya29|SG|dp\.[a-z]{2}|dt0c01|\w{10,20}\.atlasv1)\.[\w\-.=]{16,}|sha256~[\w\-]{20,}|(?:xox[a-z]|xapp)[.\-][\w\-.]{10,})`),
	regexp.MustCompile(`\b(?:(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b|ABSK[\w+/]{60,}=*|AIza[\w\-]{30,}|LTAI\w{16,}|EAA[A-Z][\w\-]{22,}|ATATT3[\w\-=]{60,}|` +
		`1//0[\w\-]{30,}|\d{8,10}:AA[\w\-]{30,}|AGE-SECRET-KEY-1\w{20,}|[\w~.]{3}\dQ~[\w~.\-]{31,})`),
}

// minToken is the length of the shortest word that may be or contain a token.
const minToken = 18

// withoutTokens leaves out the tokens of known issuers, and what looks random.
func withoutTokens(s string) string {
	var out strings.Builder
	done := 0
	for i := 0; i < len(s); i++ {
		if !isTokenByte(s[i]) {
			continue
		}
		begin := i
		if i > 0 && s[i-1] == '\\' && strings.IndexByte("nrt", s[i]) >= 0 {
			begin++ // an escaped end of line in a string
		}
		for i < len(s) && isTokenByte(s[i]) {
			i++
		}
		if i-begin < minToken {
			continue
		}
		word := bootstrapToken.ReplaceAllString(s[begin:i], "${1}"+LeftOut+"${2}")
		for _, form := range tokenForms {
			word = form.ReplaceAllString(word, LeftOut)
		}
		if len(word) != i-begin || word != s[begin:i] {
			out.WriteString(s[done:begin] + word)
			done = i
		}
	}
	out.WriteString(s[done:])
	return withoutRandom(out.String())
}

// bootstrapToken matches a token by which nodes join.
var bootstrapToken = regexp.MustCompile(`(^|[^\w.\-])[a-z0-9]{6}\.[a-z0-9]{16}([^\w.\-]|$)`)

// isTokenByte reports whether a byte can be in a token of one of the forms.
func isTokenByte(c byte) bool { return isEncoded(c) || strings.IndexByte(".~:=", c) >= 0 }

// These are how long a random text is at least, in bytes: one of letters of both cases and digits,
// and one of hexadecimal digits.
const minRandom, minHex = 16, 32

// minKey is how long a key in base64 is at least, in bytes, whose parts between other characters
// than letters and digits may be short. 256 bits are 43 letters in the alphabet of URLs.
const minKey = 40

// harmlessBefore are names whose values are random and no secrets.
var harmlessBefore = regexp.MustCompile(`(?:sha256|[dD]igests?|[vV]ersions?|hash|uid)\\*["']?[:=@][ \t]*\[?\\*["']?$`)

// withoutRandom leaves out what looks random, with what it continues in the next lines.
func withoutRandom(s string) string {
	var out strings.Builder
	done := 0
	for i := 0; i < len(s); i++ {
		if !isEncoded(s[i]) && s[i] != '%' {
			continue
		}
		begin := i
		if i > 0 && s[i-1] == '\\' && strings.IndexByte("nrt", s[i]) >= 0 {
			begin++ // an escaped end of line in a string
		}
		for i < len(s) && (isEncoded(s[i]) || s[i] == '%') {
			i++
		}
		if !isRandom(s[min(begin, i):i]) || harmlessBefore.MatchString(s[max(done, begin-32):begin]) {
			continue
		}
		for i < len(s) && s[i] == '=' {
			i++
		}
		out.WriteString(s[done:begin] + LeftOut)
		i = moreEncoded(s, i)
		done = i
	}
	out.WriteString(s[done:])
	return out.String()
}

// isRandom reports whether a word looks random as a whole, or a segment of the path that it is, or
// one of the segment's parts: with letters of both cases and digits, or of hexadecimal digits only.
// Names in Kubernetes have neither. Those of kube-proxy's chains have some capitals.
func isRandom(word string) bool {
	if len(word) >= minKey && isMixed(word, len(word)/4) {
		return true
	}
	for segment := range strings.SplitSeq(word, "/") {
		if len(segment) >= minKey && isMixed(segment, 2) {
			return true
		}
		for part := range strings.FieldsFuncSeq(segment, func(c rune) bool { return !isWord(byte(c)) }) {
			if len(part) >= minRandom && isMixed(part, 2) || len(part) >= minHex && isHex(part) {
				return true
			}
		}
	}
	return false
}

// isMixed reports whether a text has small letters, at least so many capitals, and digits.
func isMixed(s string, atLeast int) bool {
	var small, capital, digit int
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z':
			small++
		case 'A' <= c && c <= 'Z':
			capital++
		case '0' <= c && c <= '9':
			digit++
		}
	}
	return small > 0 && capital >= atLeast && digit > 0
}

// isHex reports whether a text has only hexadecimal digits, and not only letters.
func isHex(s string) bool {
	return strings.Trim(s, "0123456789abcdefABCDEF") == "" && strings.ContainsAny(s, "0123456789")
}

func isWord(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// isEncoded reports whether a byte can be within base64 of either alphabet, in hexadecimal digits
// and in most tokens.
func isEncoded(c byte) bool { return isWord(c) || strings.IndexByte("+/-_", c) >= 0 }

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

func isBlank(c byte) bool { return c == ' ' || c == '\t' }

func blanks(s string, i int) int {
	for i < len(s) && isBlank(s[i]) {
		i++
	}
	return i
}
