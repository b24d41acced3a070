package redact

import (
	"slices"
	"strings"
)

// secretWords are parts of the names of secrets, in lower case.
var secretWords = []string{
	"token", "password", "passwd", "passphrase", "passcode", "secret", "credential", "apikey", "privatekey", "accesskey", "accountkey", "pwd",
	"dockerconfigjson", "dockercfg", "signature", "connectionstring", "client-key-data", "userpass", "dbpass", "rootpass", "adminpass", "proxypass",
	"authorization", "cookie",
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

// maxName bounds what is looked at of a name, in bytes, and maxNames how many are remembered.
const maxName, maxNames = 100, 1000

// harmlessEnds are the ends of names of what is no secret, although a part of the name says so:
// files, names of objects, and numbers of metrics. They are in lower case.
var harmlessEnds = []string{
	"file", "path", "audience", "audiences", "name", "account", "accounts", "seconds", "total", "issuer", "map", "secretref",
	"secretkeyref", "review", "reviews",
}

// objectFlag is the flag of servers that names a Secret.
const objectFlag = "tls-secret"

// IsSecret reports whether the value of a name is a secret, as far as one can tell by both.
func IsSecret(name, value string) bool {
	return isSecretName(name) || !strings.ContainsAny(value, " \t\n") && withoutRandom(value) != value
}

// joined leaves out what separates the words of names.
var joined = strings.NewReplacer("-", "", "_", "", ".", "")

// isSecretName reports whether the values of a name are secrets.
func isSecretName(name string) bool {
	lower := strings.TrimLeft(strings.ToLower(name), "-")
	if lower == objectFlag || slices.ContainsFunc(harmlessEnds, func(end string) bool { return strings.HasSuffix(lower, end) }) {
		return false
	}
	plain := joined.Replace(lower)
	if slices.ContainsFunc(secretWords, func(w string) bool { return strings.Contains(lower, w) || strings.Contains(plain, w) }) {
		return true
	}
	all := segments(name)
	if len(all) == 0 || slices.Contains(all, "public") || slices.Contains(all, "pub") {
		return false
	}
	if slices.ContainsFunc(all, func(s string) bool { return slices.Contains(secretSegments, s) }) || lower == "auth" || lower == "sig" {
		return true
	}
	for _, noun := range []string{"key", "keys", "auth"} {
		before, isKey := strings.CutSuffix(plain, noun)
		header := len(all) > 1 && all[0] == "x" // such as X-Any-Key
		if isKey && !isFile(lower) && (header || slices.ContainsFunc(keyQualifiers, func(q string) bool { return strings.HasSuffix(before, q) })) {
			return true
		}
	}
	return false
}

// isFile reports whether a name is that of a file with a key, such as tls.key. Errors name such
// files.
func isFile(name string) bool { return strings.HasSuffix(name, ".key") }

// segments returns the words of a name, such as X-Auth-Key, tls.key and signingKey, in lower case.
func segments(name string) (all []string) {
	begin := 0
	end := func(i int) {
		if i > begin {
			all = append(all, strings.ToLower(name[begin:i]))
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
