package jwt

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func token(payload string) string {
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(payload)) + ".c2ln"
}

// projected is the payload of a token as a kubelet of Kubernetes 1.36 projects it.
const projected = `{"aud":["slicecast"],"exp":1786000000,"iat":1754464000,"iss":"https://kubernetes.default.svc.cluster.local",
"jti":"5d0e","kubernetes.io":{"namespace":"slicecast-system","node":{"name":"node-1","uid":"aa"},"pod":{"name":"agent","uid":"bb"},
"serviceaccount":{"name":"slicecast-agent","uid":"cc"},"warnafter":1754467607},"nbf":1754464000,
"sub":"system:serviceaccount:slicecast-system:slicecast-agent"}`

func TestParse(t *testing.T) {
	c, ok := Parse(token(projected))
	require.True(t, ok)
	require.Equal(t, "system:serviceaccount:slicecast-system:slicecast-agent", c.Subject)
	require.Equal(t, oneOrMore{"slicecast"}, c.Audiences)
	require.Equal(t, "node-1", c.Kubernetes.Node.Name)
	require.False(t, c.Expired(time.Unix(1786000000, 0)))
	require.True(t, c.Expired(time.Unix(1786000001, 0)))

	c, ok = Parse(token(`{"aud":"one"}`))
	require.True(t, ok)
	require.Equal(t, oneOrMore{"one"}, c.Audiences)
	require.True(t, c.Expired(time.Now()), "it does not say until when")

	for name, bad := range map[string]string{
		"opaque": "nonsense", "two parts": "a.e30", "four parts": token("{}") + ".x", "no base64": "a.***.c", "no JSON": token("{"),
		"odd audience": token(`{"aud":7}`), "huge": token("{}") + strings.Repeat("x", maxSize), "": "",
	} {
		_, ok := Parse(bad)
		require.False(t, ok, name)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("e30", []byte(projected), "c2ln")
	f.Add("", []byte(`{"aud":"one","exp":1e400}`), "")
	f.Fuzz(func(t *testing.T, header string, payload []byte, signature string) {
		_, _ = Parse(header + string(payload) + signature)
		c, ok := Parse(header + "." + base64.RawURLEncoding.EncodeToString(payload) + "." + signature)
		if ok {
			require.True(t, json.Valid(payload))
			c.Expired(time.Now())
		}
	})
}
