// Package redacttest has secrets in the forms in which programs print them, for tests that look for
// what is left of them.
package redacttest

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Form is a text with a secret in it.
type Form struct {
	// Text has one or more lines.
	Text string
	// Secrets are the parts of the text of which nothing may be left.
	Secrets []string
	// Open means that the secret has no end, so that all that follows may be a part of it.
	Open bool
}

// gram is how long a part of a secret is at least that counts, in bytes.
const gram = 6

// Left returns the parts of secrets that are in a text: a quarter of one or more.
func Left(text string, forms ...Form) (left []string) {
	grams := make(map[string]bool)
	for i := range max(0, len(text)-gram+1) {
		grams[text[i:i+gram]] = true
	}
	for _, f := range forms {
		for _, secret := range f.Secrets {
			enough := max(gram, len(secret)/4)
			for begin, end := 0, gram; end <= len(secret); end++ {
				switch {
				case !grams[secret[end-gram:end]]:
					begin = end - gram + 1
				case end-begin >= enough && strings.Contains(text, secret[begin:end]):
					left = append(left, secret[begin:end])
					begin = end
					end += gram - 1
				}
			}
		}
	}
	return left
}

// Join returns the texts of forms, each followed by one of the lines, which are no secrets.
func Join(forms []Form) (text string, lines []string) {
	var out strings.Builder
	for i, f := range forms {
		if !f.Open {
			lines = append(lines, fmt.Sprintf("level=INFO msg=Line number=%d", i))
			out.WriteString(f.Text + "\n" + lines[len(lines)-1] + "\n")
		}
	}
	return out.String(), lines
}

const (
	digits  = "0123456789"
	hexa    = digits + "abcdef"
	small   = "abcdefghijklmnopqrstuvwxyz"
	capital = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	letters = small + capital
	all     = digits + letters
)

// maker makes secrets, the same ones each time, except for keys.
type maker struct {
	*rand.Rand

	t     testing.TB
	forms []Form
}

// random returns a random text of n characters of an alphabet.
func (m *maker) random(n int, alphabet string) string {
	out := make([]byte, n)
	for i := range out {
		out[i] = alphabet[m.IntN(len(alphabet))]
	}
	return string(out)
}

// add adds a form.
func (m *maker) add(format string, secrets ...string) {
	args := make([]any, len(secrets))
	for i, s := range secrets {
		args[i] = s
	}
	m.forms = append(m.forms, Form{Text: fmt.Sprintf(format, args...), Secrets: secrets})
}

// within adds a form of a text with several secrets. The format has one %s.
func (m *maker) within(format, text string, secrets ...string) {
	m.forms = append(m.forms, Form{Text: strings.Replace(format, "%s", text, 1), Secrets: secrets})
}

// Forms returns secrets in all forms.
func Forms(t testing.TB) []Form {
	t.Helper()
	m := &maker{Rand: rand.New(rand.NewPCG(1, 2)), t: t}
	m.named()
	m.tokens()
	m.keys()
	m.encoded()
	m.others()
	return m.forms
}

// named adds values after the names that secrets have.
func (m *maker) named() {
	// Nothing but the name says that such a value is a secret.
	plain := func() string { return "hunter-" + m.random(6, small) }
	for _, name := range []string{
		"pass", "PASS", "db_pass", "DB_PASS", "userPass", "password", "PGPASSWORD", "MYSQL_PWD", "passwd", "passphrase", "redis-pw", "psk", "wifi.psk",
		"cred", "creds", "credentials", "token", "accessToken", "X-Vault-Token", "PRIVATE-TOKEN", "X-Amz-Security-Token", "X-CSRF-Token", "client_secret",
		"X-Auth-Key", "x-auth-key", "X-Api-Key", "Api-Key", "apikey", "apiKey", "X-Any-Key", "Ocp-Apim-Subscription-Key", "x-functions-key", "signing_key",
		"signingKey", "encryptionKey", "hmac-key", "masterKey", "ssh_key", "shared-key", "license_key", "jwt", "totp", "X-Auth", "basic_auth", "registryAuth", "dsn",
		"connection-string", "ConnectionString",
	} {
		for _, form := range []string{"%s=%%s", "%s: %%s", `"%s":"%%s"`, `%s="%%s"`, `map[%s:[%%s]]`, `err="refused: {\"%s\":\"%%s\"}"`, "a\n  %s:\n    %%s", `"a\n%s: %%s\nb"`, "?a=b&%s=%%s"} {
			m.add(fmt.Sprintf(form, name), plain())
		}
		m.add(fmt.Sprintf("--%s %%s", strings.ToLower(name)), plain())
	}
	m.add(`[{"name":"DB_PASS","value":"%s"}]`, plain())
	m.add("env:\n- name: DB_PASS\n  value: %s\n", plain())
	m.add("env:\n- name: \"API_KEY\"\n  value: \"%s\"\n", plain())
	m.add(`"- name: DB_PASS\n  value: %s\n"`, plain())
	m.add("<password>%s</password>", plain())
	m.add(`<add key="DbPassword" value="%s"/>`, plain())
	m.add("next=%%2Flogin%%3Fpass%%3D%s", plain())
	m.add("curl -u admin:%s https://host", plain())
	m.add("curl --user 'admin:%s' https://host", plain())
	m.add("curl --proxy-user=admin:%s https://host", plain())
	m.add("opening root:%s@tcp(10.0.0.1:3306)/db", plain())
	m.add("Server=tcp:db;User ID=a;Password=%s;Encrypt=true", plain())
	m.add("https://%s@host/path", plain())
	m.add("redis://:%s@host:6379", plain())
	m.add("machine host login user password %s", plain())
	m.add("{&quot;password&quot;:&quot;%s&quot;}", plain())
	for _, form := range []string{"password = \"\"\"\n%s\n\"\"\"\n", "export PASSWORD=\\\n%s", "password = '''a\n%s'''"} {
		m.add(form, plain())
	}
	for _, form := range []string{"root:$6$salt$%s:19000:0", "user:$apr1$salt$%s", "hash $2y$10$%s", "$argon2id$v=19$m=65536,t=3,p=4$c2FsdA$%s"} {
		m.add(form, m.random(43, letters))
	}
	// Such a name is not only of secrets, but the value is random.
	for _, value := range []string{m.random(32, hexa), m.random(64, hexa), m.random(40, all), base64.StdEncoding.EncodeToString([]byte(m.random(32, all)))} {
		for _, form := range []string{"key=%s", "key: %s", `{"key":"%s"}`, "session=%s", "tls.key: %s", "ca.key=%s", "peer-key %s", "the token %s was refused", "password %s", "sid: %s", "salt='%s'", "keys: [%s]", "keys:\n- %s", "key: |\n  %s"} {
			m.add(form, value)
		}
	}
}

// tokens adds tokens whose form says what they are, in any place.
func (m *maker) tokens() {
	for _, token := range []string{
		"github_pat_" + m.random(22, all) + "_" + m.random(59, all), "ghp_" + m.random(36, all), "gho_" + m.random(36, all), "ghs_" + m.random(36, all),
		"glpat-" + m.random(20, all), "glpat-" + m.random(30, all) + ".01." + m.random(9, digits+small), "gldt-" + m.random(20, all), "glrt-" + m.random(20, all),
		"glptt-" + m.random(40, hexa), "glcbt-64_" + m.random(20, all), "gloas-" + m.random(64, hexa), "glagent-" + m.random(50, all),
		"hvs." + m.random(95, all), "hvs." + m.random(24, all), "hvb." + m.random(140, all), "hvr." + m.random(95, all),
		"npm_" + m.random(36, all), "pypi-AgEIcHlwaS5vcmc" + m.random(60, all), "rubygems_" + m.random(48, hexa), "dckr_pat_" + m.random(27, all),
		"dop_v1_" + m.random(64, hexa), "doo_v1_" + m.random(64, hexa), "dor_v1_" + m.random(64, hexa),
		"sk-" + m.random(48, all), "sk-ant-api03-" + m.random(95, all), "sk-proj-" + m.random(74, all), "sk_live_" + m.random(24, all), "rk_live_" + m.random(24, all),
		"AIza" + m.random(35, all), "ya29." + m.random(60, all), "GOCSPX-" + m.random(28, all), "1//0" + m.random(60, all),
		"xoxb-" + m.random(12, digits) + "-" + m.random(12, digits) + "-" + m.random(24, all), "xapp-1-" + m.random(11, capital+digits) + "-" + m.random(13, digits) + "-" + m.random(64, hexa),
		"xoxe.xoxp-1-" + m.random(160, capital+digits),
		"AKIA" + m.random(16, capital), "ASIA" + m.random(16, capital), "ABSK" + m.random(120, all),
		"SG." + m.random(22, all) + "." + m.random(43, all), "shpat_" + m.random(32, hexa), "hf_" + m.random(34, letters), "dapi" + m.random(32, hexa),
		"lin_api_" + m.random(40, all), "sntryu_" + m.random(64, hexa), "glsa_" + m.random(32, all) + "_" + m.random(8, hexa), "glc_" + m.random(60, all),
		"tskey-auth-" + m.random(12, all) + "-" + m.random(32, all), "PMAK-" + m.random(24, hexa) + "-" + m.random(34, hexa), "NRAK-" + m.random(27, capital+digits),
		"pul-" + m.random(40, hexa), m.random(14, all) + ".atlasv1." + m.random(64, all), "ATATT3" + m.random(186, all), "dp.pt." + m.random(43, all),
		"AGE-SECRET-KEY-1" + m.random(58, capital), m.random(3, all) + "8Q~" + m.random(34, all), "dt0c01." + m.random(24, capital+digits) + "." + m.random(64, capital+digits),
		"sha256~" + m.random(43, all), "LTAI" + m.random(20, all), "EAAA" + m.random(60, all), "xkeysib-" + m.random(64, hexa) + "-" + m.random(16, all),
		m.random(10, digits) + ":AA" + m.random(33, all),
		"vndr_pat_" + m.random(40, all),                                    // of an unknown vendor
		"aB3-dE5_gH7-jK9_mN1-pQ3_sT5-vW7_yZ9-bC1_eF3-hJ",                   // parts like words
		"MIIEpAIBAAKCAQEA+DqAPlNE7a/sQ/JRwrJEMNZzdcaWDaQxs+WIsYmVSefJKHAl", // the same, of RSA
		"eyJhbGciOiJSUzI1NiJ9." + m.random(60, all) + "." + m.random(60, all),
	} {
		for _, form := range []string{"level=INFO msg=%s", "refused %s, again", `{"a":"%s"}`, "x: y\n%s\n", `"a\n%s\nb"`, "https://host/?a=%s&b=c", "GET /v1/keys/%s/x", "(%s)"} {
			m.add(form, token)
		}
	}
	for _, place := range []string{"https://hooks.slack.com/services/T0/B0/%s", "https://a.webhook.office.com/webhookb2/%s", "https://discord.com/api/webhooks/1/%s"} {
		m.add(place, m.random(40, hexa))
		m.add(`{"url":"`+place+`"}`, m.random(40, hexa))
	}
	for _, form := range []string{"token %s", `"a\n%s\nb"`, `{"a":"%s"}`} {
		m.add(form, m.random(6, digits+small)+"."+m.random(16, digits+small)) // which joins nodes
	}
	m.add(`"a\nBearer %s\nb"`, m.random(20, small))
}

// lines returns the lines of a text that have a secret, without those around keys in PEM.
func lines(text string) []string {
	return slices.DeleteFunc(strings.Split(strings.TrimSpace(text), "\n"), func(l string) bool { return strings.HasPrefix(l, "---") || len(l) < 16 })
}

// wrapped returns a text in lines of n characters.
func wrapped(text string, n int, between string) string {
	var out []string
	for ; len(text) > n; text = text[n:] {
		out = append(out, text[:n])
	}
	return strings.Join(append(out, text), between)
}

// keys adds private keys.
func (m *maker) keys() {
	_, edwards, err := ed25519.GenerateKey(crand.Reader)
	require.NoError(m.t, err)
	curve, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	require.NoError(m.t, err)
	old, err := rsa.GenerateKey(crand.Reader, 2048)
	require.NoError(m.t, err)
	var blocks []*pem.Block
	for _, key := range []any{edwards, curve} {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		require.NoError(m.t, err)
		blocks = append(blocks, &pem.Block{Type: "PRIVATE KEY", Bytes: der})
	}
	der, err := x509.MarshalECPrivateKey(curve)
	require.NoError(m.t, err)
	blocks = append(blocks, &pem.Block{Type: "EC PRIVATE KEY", Bytes: der}, &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(old)},
		&pem.Block{Type: "OPENSSH PRIVATE KEY", Bytes: []byte("openssh-key-v1\x00" + m.random(200, all))},
		&pem.Block{Type: "PGP PRIVATE KEY BLOCK", Bytes: []byte(m.random(200, all))}, &pem.Block{Type: "ENCRYPTED PRIVATE KEY", Bytes: []byte(m.random(200, all))})
	for _, b := range blocks {
		text := string(pem.EncodeToMemory(b))
		secrets := lines(text)
		quoted, err := json.Marshal(text)
		require.NoError(m.t, err)
		m.within("a\n%sb", text, secrets...)
		m.within("tls.key: |\n  %s\nb: c", strings.ReplaceAll(text, "\n", "\n  "), secrets...)
		m.within(`{"tls.key":%s}`, string(quoted), secrets...)
		m.within("cut off: %s", text[:len(text)-40], lines(text[:len(text)-40])...)
		m.forms[len(m.forms)-1].Open = true
		if b.Type != "PGP PRIVATE KEY BLOCK" {
			_, rest, _ := strings.Cut(text, "\n")
			m.within("%sthe log begins within a key", rest, secrets...)
		}
		for _, e := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding, base64.RawStdEncoding} {
			one := e.EncodeToString([]byte(text))
			for _, form := range []string{"tls.key: %s", `{"tls.key":"%s"}`, "level=INFO msg=%s", "a=%s,b", "x %s y", "data:text/plain;base64,%s", "- %s\n", `"a\n%s\nb"`} {
				m.within(form, one, one[:len(one)-4])
			}
			m.within("cut off %s", one[:len(one)-17], one[:len(one)-17])
			m.within("x: %s", e.EncodeToString([]byte("---\na: b\ntls.key: |\n"+text)), e.EncodeToString([]byte("---\na: b\ntls.key: |\n" + text))[60:])
			m.within("twice %s", e.EncodeToString([]byte(one)), e.EncodeToString([]byte(one))[:len(one)])
			for _, n := range []int{64, 76} {
				cut := wrapped(one, n, "\n")
				m.within("tls.key: |\n%s\nb: c", cut, lines(cut)...)
				m.within("a:\n  %s\nb: c", wrapped(one, n, "\n  "), lines(cut)...)
				m.within(`"a: %s\nb"`, wrapped(one, n, `\n`), lines(cut)...)
			}
		}
		if !strings.HasPrefix(b.Type, "PGP") && !strings.HasPrefix(b.Type, "ENC") {
			one := base64.StdEncoding.EncodeToString(b.Bytes)
			m.within("msg=%s x", one, one)
			m.within(`"a\n%s\nb"`, one, one)
			m.within("a:\n%s\nb: c", wrapped(one, 64, "\n"), lines(wrapped(one, 64, "\n"))...)
		}
	}
	scalar, err := curve.Bytes()
	require.NoError(m.t, err)
	d := base64.RawURLEncoding.EncodeToString(scalar)
	m.add(`{"kty":"EC","crv":"P-256","x":"abc","d":"%s"}`, d)
	m.add(`{\"keys\":[{\"d\":\"%s\",\"kty\":\"EC\"}]}`, d)
	m.add(`{"k":"%s","kty":"oct"}`, m.random(43, all))
}

// encoded adds texts in base64 that have a secret.
func (m *maker) encoded() {
	for _, text := range []string{
		`{"auths":{"registry.example":{"auth":"` + m.random(20, all) + `"}}}`,
		"apiVersion: v1\nkind: Config\nusers:\n- name: a\n  user:\n    token: " + m.random(40, all) + "\n",
		"ghp_" + m.random(36, all), "password=hunter-" + m.random(6, small), "https://user:" + m.random(12, all) + "@host/",
	} {
		for _, e := range []*base64.Encoding{base64.StdEncoding, base64.RawURLEncoding} {
			m.add("level=INFO msg=%s", e.EncodeToString([]byte(text)))
			m.add(`{"value":"%s"}`, e.EncodeToString([]byte(text)))
			m.add("twice %s", e.EncodeToString([]byte(e.EncodeToString([]byte(text)))))
		}
		m.add("https://host/?x=%s", url.QueryEscape(base64.StdEncoding.EncodeToString([]byte(text))))
	}
}

// others adds secrets of other programs: in annotations, flags and proxies' URLs, and keys of
// clouds.
func (m *maker) others() {
	plain := func() string { return "hunter-" + m.random(6, small) }
	for _, form := range []string{
		"metadata:\n  annotations:\n    vault.example/agent-token: %s\n", `{"annotations":{"vendor.example/db-password":"%s"}}`,
		"vendor --token=%s --v=2", "vendor --password %s --v=2", "run [vendor --api-key %s]", `{"command":["vendor","--password","%s"]}`, `args=["--auth", "%s"]`,
		"HTTP_PROXY=http://user:%s@proxy.example:3128", `proxyconnect tcp: "http://user:it's%s@proxy.example"`, "http_proxy: 'http://%s@proxy.example'",
		`{"Name":"DB_PASS","Value":"%s"}`, `[{"key":"DB_PASS","value":"%s"}]`, "\x1b[31mpassword\x1b[0m=%s", "a%%253Fpassword%%253d%s", "PUBLIC_API_TOKEN=%s",
		`Get "https://host/?a=b\u0026sig=%s"`, `x password\u003d%s`, "csrf=%s", "SessionID=%s",
		"the password of user a is %s", "wrong password (%s)", "password->%s", `{"password":"%s","password":true}`,
	} {
		m.add(form, plain())
	}
	for _, key := range []string{
		"AKIA" + m.random(16, capital+digits), m.random(19, all) + "/" + m.random(20, all), "key-" + m.random(36, small+digits), m.random(32, hexa),
	} {
		for _, form := range []string{"found %s", `{"a":"%s"}`, "aws_secret_access_key = %s", "AccountKey=%s;x=y", "pwhash=%s", "a:\n- %s\n"} {
			m.add(form, key)
		}
	}
}
