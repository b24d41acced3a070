// These tests prove that a package is fetched from the mirror or else from the archive, that only
// the pinned bytes are accepted, and that a version has to say what is in an image.
package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFetch fetches a package that the mirror has, and one that only the archive still has.
func TestFetch(t *testing.T) {
	served := map[string]string{
		"/mirror/debian/pool/new.deb":                                    "new",
		"/archive/debian-security/20261125T000000Z/pool/old%2bdeb13.deb": "old",
		"/mirror/debian/pool/forged.deb":                                 "forged",
		"/archive/debian/20261125T000000Z/pool/forged.deb":               "forged, too",
	}
	var requests []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests = append(requests, r.URL.EscapedPath())
		content, ok := served[r.URL.EscapedPath()]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(content))
	}))
	defer server.Close()
	defer http.DefaultClient.CloseIdleConnections()
	d := &debian{
		snapshot: "20261125T000000Z", cache: t.TempDir(), mirror: server.URL + "/mirror/", archive: server.URL + "/archive/",
	}
	fetched := func(content, url string) {
		t.Helper()
		file, err := d.fetch(t.Context(), pin{hash: hash([]byte(content)), url: mirror + url})
		require.NoError(t, err)
		got, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, content, string(got))
	}
	fetched("new", "debian/pool/new.deb")
	fetched("old", "debian-security/pool/old%2bdeb13.deb")
	require.Len(t, requests, 3)
	fetched("new", "debian/pool/new.deb")
	require.Len(t, requests, 3, "the cache was not used")

	_, err := d.fetch(t.Context(), pin{hash: hash([]byte("pinned")), url: mirror + "debian/pool/forged.deb"})
	require.ErrorContains(t, err, "SHA-256 is "+hash([]byte("forged"))+" instead of "+hash([]byte("pinned")))
	require.ErrorContains(t, err, "run internal/tools/release/pin.sh")
	_, err = d.fetch(t.Context(), pin{hash: hash([]byte("gone")), url: mirror + "debian/pool/gone.deb"})
	require.ErrorContains(t, err, "404")
}

// TestPins requires that both architectures have the same packages.
func TestPins(t *testing.T) {
	d, err := newDebian()
	require.NoError(t, err)
	require.NotEmpty(t, d.snapshot)
	names := map[string][]string{}
	for _, p := range d.packages {
		name, _, _ := strings.Cut(p.url[strings.LastIndex(p.url, "/")+1:], "_")
		names[p.architecture] = append(names[p.architecture], p.layer+" "+name)
	}
	require.Len(t, names, len(architectures))
	require.Equal(t, names["amd64"], names["arm64"])
}

// TestVersion requires that images get the version of git unless another one is given, and never
// latest.
func TestVersion(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, args := range []string{
		"init -q", "-c user.name=T -c user.email=t@example.com commit -q --allow-empty -m first", "tag v0.1.0",
	} {
		out, err := exec.CommandContext(t.Context(), "git", strings.Fields(args)...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	r, err := newRelease(t.Context(), "")
	require.NoError(t, err)
	require.Equal(t, "v0.1.0", r.version)
	require.Len(t, r.revision, 40)
	require.NotZero(t, r.created.Unix())

	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	r, err = newRelease(t.Context(), "v0.2.0")
	require.NoError(t, err)
	require.Equal(t, "v0.2.0", r.version)
	require.Equal(t, int64(1700000000), r.created.Unix())

	_, err = newRelease(t.Context(), "latest")
	require.ErrorContains(t, err, "name a version")
	t.Chdir(t.TempDir())
	_, err = newRelease(t.Context(), "")
	require.ErrorContains(t, err, "in a clone of the repository")
}
