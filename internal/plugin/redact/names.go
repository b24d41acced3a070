package redact

import (
	"math"
	"slices"
	"strings"
)

// secretWords are parts of the names of secrets, in lower case.
var secretWords = []string{
	"token", "password", "passwd", "passphrase", "passcode", "secret", "credential", "apikey", "privatekey", "accesskey", "accountkey", "pwd",
	"dockerconfigjson", "dockercfg", "signature", "connectionstring", "client-key-data", "userpass", "dbpass", "rootpass", "adminpass", "proxypass",
}

// secretSegments are whole segments of the names of secrets. Longer words that contain them name
// other things.
var secretSegments = []string{"pass", "pw", "psk", "cred", "creds", "jwt", "otp", "totp", "dsn", "bearer"}

// keyQualifiers are before key, keys or auth in the names of secrets.
var keyQualifiers = []string{
	"access", "account", "admin", "aes", "api", "app", "auth", "basic", "client", "consumer", "cryption", "deploy", "encrypt", "functions", "hmac", "host",
	"http", "ingest", "integration", "license", "master", "private", "proxy", "registry", "root", "rsa", "secret", "server", "shared", "sign", "signing",
	"ssh", "storage", "subscription", "tls", "webhook", "write",
}

// weakSegments are the last segments of names that secrets and other things have. A value after
// such a name is left out if it looks random.
var weakSegments = []string{"key", "keys", "auth", "session", "sessionid", "sid", "sig", "salt", "nonce", "access", "seed", "code", "csrf", "xsrf", "pin"}

// candidates are what all names of secrets contain, in lower case.
var candidates = []string{
	"token", "pass", "secret", "cred", "key", "pw", "dockerc", "sig", "connection", "auth", "jwt", "otp", "psk", "dsn", "bearer", "session", "sid",
	"salt", "nonce", "access", "seed", "code", "csrf", "xsrf", "pin",
}

// maxName bounds what is looked at of a name, in bytes on each side of a candidate.
const maxName = 100

// harmlessEnds are the ends of names of what is no secret, although a part of the name says so:
// files, names of objects, and numbers of metrics. They are in lower case.
var harmlessEnds = []string{
	"file", "path", "audience", "audiences", "name", "account", "accounts", "seconds", "total", "issuer", "map", "secretref",
	"secretkeyref", "review", "reviews",
}

// objectFlag is the flag of servers that names a Secret.
const objectFlag = "tls-secret"

// suspicion says what a name says about its value.
type suspicion int

const (
	// harmless means that the value is no secret.
	harmless suspicion = iota
	// weak means that the value is a secret if it looks random.
	weak
	// strong means that the value is a secret.
	strong
)

// IsSecret reports whether the value of a name is a secret, as far as one can tell by both.
func IsSecret(name, value string) bool {
	says := suspect(name)
	return says == strong || says == weak && looksRandom(value)
}

// joined leaves out what separates the words of names.
var joined = strings.NewReplacer("-", "", "_", "", ".", "")

// maxNames bounds how many names a text's names are compared with.
const maxNames = 1000

// remembered returns a function that does what says does, and keeps the answers. Most names of a
// text are in it many times.
func remembered(says func(string) suspicion) func(string) suspicion {
	known := make(map[string]suspicion)
	return func(name string) suspicion {
		answer, ok := known[name]
		if !ok {
			answer = says(name)
			if len(known) < maxNames {
				known[name] = answer
			}
		}
		return answer
	}
}

// suspect returns what a name says about its value.
func suspect(name string) suspicion {
	lower := strings.TrimLeft(lowered(name), "-")
	ends := func(end string) bool { return strings.HasSuffix(lower, end) }
	if lower == objectFlag || slices.ContainsFunc(harmlessEnds, ends) {
		return harmless
	}
	plain := joined.Replace(lower)
	contains := func(word string) bool { return strings.Contains(lower, word) || strings.Contains(plain, word) }
	if slices.ContainsFunc(secretWords, contains) {
		return strong
	}
	all := segments(name)
	if len(all) == 0 || slices.Contains(all, "public") || slices.Contains(all, "pub") {
		return harmless
	}
	if slices.ContainsFunc(all, func(s string) bool { return slices.Contains(secretSegments, s) }) || lower == "auth" {
		return strong
	}
	last := all[len(all)-1]
	for _, noun := range []string{"key", "keys", "auth"} {
		before, isKey := strings.CutSuffix(plain, noun)
		header := len(all) > 1 && all[0] == "x" // such as X-Any-Key
		if isKey && !isFile(lower) && (header || slices.ContainsFunc(keyQualifiers, func(q string) bool { return strings.HasSuffix(before, q) })) {
			return strong
		}
	}
	if slices.Contains(weakSegments, last) {
		return weak
	}
	return harmless
}

// isFile reports whether a name is that of a file with a key, such as tls.key. Errors name such
// files.
func isFile(name string) bool { return strings.HasSuffix(name, ".key") }

// segments returns the words of a name, such as X-Auth-Key, tls.key and signingKey, in lower case.
func segments(name string) (all []string) {
	begin := 0
	end := func(i int) {
		if i > begin {
			all = append(all, lowered(name[begin:i]))
		}
	}
	upper := func(i int) bool { return 'A' <= name[i] && name[i] <= 'Z' }
	for i := range len(name) {
		switch {
		case name[i] == '-' || name[i] == '_' || name[i] == '.':
			end(i)
			begin = i + 1
		case i > begin && upper(i) && (!upper(i-1) || i+1 < len(name) && !upper(i+1) && isLetter(name[i+1])):
			end(i)
			begin = i
		}
	}
	end(len(name))
	return all
}

func isLetter(c byte) bool { return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' }

// isEncoded reports whether a byte can be within base64 of either alphabet, in hexadecimal digits
// and in most tokens.
func isEncoded(c byte) bool {
	return isLetter(c) || '0' <= c && c <= '9' || c == '+' || c == '/' || c == '-' || c == '_'
}

// These are how long a random value is at least, in bytes, and how many bits of entropy each of its
// characters has. Hexadecimal digits have 4 at most, and those of short values have less.
const minRandom, minEntropy = 20, 3.0

// looksRandom reports whether a value looks like a key: it has letters and digits in a long word,
// or capital and small letters and digits in several, and few of its characters are alike. Names in
// Kubernetes have neither.
func looksRandom(value string) bool {
	value = strings.TrimRight(value, "=")
	if len(value) < minRandom {
		return false
	}
	var counts [256]int
	var small, capital, digit bool
	word, longest := 0, 0 // of letters and digits
	wordHas := [2]bool{}  // letters and digits in the word
	mixed := false        // a long word has both
	for i := range len(value) {
		c := value[i]
		if !isEncoded(c) && c != '.' && c != '~' {
			return false
		}
		counts[c]++
		switch {
		case 'a' <= c && c <= 'z':
			small, wordHas[0] = true, true
		case 'A' <= c && c <= 'Z':
			capital, wordHas[0] = true, true
		case '0' <= c && c <= '9':
			digit, wordHas[1] = true, true
		default:
			word, wordHas = 0, [2]bool{}
			continue
		}
		word++
		longest = max(longest, word)
		mixed = mixed || word >= minRandom && wordHas[0] && wordHas[1]
	}
	entropy := 0.0
	for _, n := range counts {
		if n > 0 {
			p := float64(n) / float64(len(value))
			entropy -= p * math.Log2(p)
		}
	}
	return entropy >= minEntropy && (mixed || small && capital && digit && longest >= 6)
}
