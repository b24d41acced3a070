// These tests prove that two dry runs of a release make the same bytes, except for what is signed.
// The archives have the programs and files that users install, with SBOMs. The commands of
// docs/releasing.md, which run openssl, accept what is signed and nothing else.
package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	provenancev1 "github.com/in-toto/attestation/go/predicates/provenance/v1"
	attestation "github.com/in-toto/attestation/go/v1"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/secure-systems-lab/go-securesystemslib/signerverifier"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdxlib"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
)

// TestTwoBuildsAreTheSame compares everything that two builds have written, byte by byte. Only the
// keys differ, and with them what is signed.
func TestTwoBuildsAreTheSame(t *testing.T) {
	signed := map[string]bool{"/" + signatureFile: true, "/" + provenanceFile: true, "/" + publicKeyFile: true}
	names := func(dir string) (all []string) {
		require.NoError(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.Type().IsRegular() {
				all = append(all, strings.TrimPrefix(path, dir))
			}
			return err
		}))
		return all
	}
	first := names(firstRelease)
	require.Greater(t, len(first), 2*(len(images)+len(bundles))*len(architectures))
	require.Equal(t, first, names(secondRelease))
	for _, name := range first {
		a, err := os.ReadFile(firstRelease + name)
		require.NoError(t, err)
		b, err := os.ReadFile(secondRelease + name)
		require.NoError(t, err)
		assert.Equal(t, !signed[name], bytes.Equal(a, b), "%s in both builds", name)
	}
}

// TestArchives unpacks the archives for this machine, and runs their programs.
func TestArchives(t *testing.T) {
	for name, content := range map[string][]string{
		"slicecast": {
			"CHANGELOG.md", "LICENSE", "README.md", "bin/slicecast-agent", "bin/slicecast-loadtest", "bin/slicecast-server",
			"deploy/systemd/agent.yaml", "deploy/systemd/server.yaml", "deploy/systemd/slicecast-agent.service",
			"deploy/systemd/slicecast-server.service", "deploy/systemd/slicecast-server.sysusers",
		},
		"kubectl-slicecast": {"CHANGELOG.md", "LICENSE", "README.md", "kubectl-slicecast", "kubectl_complete-slicecast"},
	} {
		for _, architecture := range architectures {
			folder := name + "_v1.2.3-test_linux_" + architecture
			archive, err := os.Open(filepath.Join(firstRelease, folder+".tar.gz"))
			require.NoError(t, err)
			dir := t.TempDir()
			untar(t, dir, archive, "--gzip", "--preserve-permissions")
			require.NoError(t, archive.Close())
			var found []string
			require.NoError(t, filepath.WalkDir(filepath.Join(dir, folder), func(path string, entry fs.DirEntry, err error) error {
				if err != nil || entry.IsDir() {
					return err
				}
				relative, err := filepath.Rel(filepath.Join(dir, folder), path)
				found = append(found, relative)
				return err
			}))
			require.Equal(t, content, found)
			requireSBOM(t, folder+".tar.gz")
			if architecture == runtime.GOARCH {
				requireVersions(t, filepath.Join(dir, folder))
			}
		}
	}
}

// requireVersions requires that all programs below a folder print the version.
func requireVersions(t *testing.T, dir string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != "" || entry.IsDir() || entry.Name() == "LICENSE" || entry.Name() == "kubectl_complete-slicecast" {
			return err
		}
		out, err := exec.CommandContext(t.Context(), path, "--version").CombinedOutput()
		require.NoError(t, err, string(out))
		name := strings.Replace(entry.Name(), "kubectl-", "kubectl ", 1)
		require.Equal(t, name+" v1.2.3-test\ncommit: "+testRelease.revision+"\nGo: "+runtime.Version()+
			"\nplatform: linux/"+runtime.GOARCH+"\n", string(out))
		return nil
	}))
}

// requireSBOM requires that an archive has a valid SBOM, which lists every module once.
func requireSBOM(t *testing.T, archive string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(firstRelease, archive))
	require.NoError(t, err)
	f, err := os.Open(filepath.Join(firstRelease, archive+".spdx.json"))
	require.NoError(t, err)
	defer f.Close()
	doc, err := spdxjson.Read(f)
	require.NoError(t, err)
	require.NoError(t, spdxlib.ValidateDocument(doc))
	require.Equal(t, hash(content), doc.Packages[0].PackageChecksums[0].Value)
	listed := make(map[string]bool)
	for _, p := range doc.Packages {
		locator := p.PackageExternalReferences[0].Locator
		require.False(t, listed[locator], locator)
		listed[locator] = true
	}
	require.True(t, listed["pkg:golang/github.com/slicecast/slicecast@v1.2.3-test"])
	require.True(t, listed["pkg:golang/stdlib@"+strings.TrimPrefix(runtime.Version(), "go")])
}

// TestArchivesOfWindows requires that the plugin's archive for Windows is a zip file whose programs
// can be run.
func TestArchivesOfWindows(t *testing.T) {
	content := files{"f/kubectl-slicecast.exe": {mode: 0o755, content: []byte("program")}, "f/LICENSE": {mode: 0o644}}
	packed, err := pack(content, platform{os: "windows"}, testRelease.created)
	require.NoError(t, err)
	again, err := pack(content, platform{os: "windows"}, testRelease.created)
	require.NoError(t, err)
	require.Equal(t, packed, again)
	archive, err := zip.NewReader(bytes.NewReader(packed), int64(len(packed)))
	require.NoError(t, err)
	require.Equal(t, "f/LICENSE", archive.File[0].Name)
	require.Equal(t, fs.FileMode(0o755), archive.File[1].Mode())
	require.True(t, archive.File[1].Modified.Equal(testRelease.created))
}

// TestChart requires that the chart has the version, and no time but that of the commit.
func TestChart(t *testing.T) {
	archive, err := os.Open(filepath.Join(firstRelease, "slicecast-1.2.3-test.tgz"))
	require.NoError(t, err)
	defer archive.Close()
	dir := t.TempDir()
	untar(t, dir, archive, "--gzip")
	chart, err := os.ReadFile(filepath.Join(dir, "slicecast/Chart.yaml"))
	require.NoError(t, err)
	require.Contains(t, string(chart), "\nappVersion: v1.2.3-test\n")
	info, err := os.Stat(filepath.Join(dir, "slicecast/values.yaml"))
	require.NoError(t, err)
	require.True(t, info.ModTime().Equal(testRelease.created), info.ModTime())
}

// verify runs the commands that users run, on a copy of a release in which one file has changed.
func verify(t *testing.T, change string, edit func([]byte) []byte) (string, error) {
	t.Helper()
	dir := t.TempDir()
	entries, err := os.ReadDir(firstRelease)
	require.NoError(t, err)
	for _, e := range entries {
		if e.Name() != change {
			require.NoError(t, os.Symlink(filepath.Join(firstRelease, e.Name()), filepath.Join(dir, e.Name())))
		}
	}
	if change != "" {
		content, err := os.ReadFile(filepath.Join(firstRelease, change))
		require.NoError(t, err)
		edited := edit(content)
		require.NotEqual(t, content, edited)
		require.NoError(t, os.WriteFile(filepath.Join(dir, change), edited, 0o600))
	}
	out, err := exec.CommandContext(t.Context(), "./verify.sh", dir).CombinedOutput()
	return string(out), err
}

// TestVerification requires that the commands accept the release and nothing else.
func TestVerification(t *testing.T) {
	out, err := verify(t, "", nil)
	require.NoError(t, err, out)
	require.Equal(t, 2, strings.Count(out, "Verified OK\n"), out)
	require.Contains(t, out, "slicecast_v1.2.3-test_linux_amd64.tar.gz: OK\n")
	require.Contains(t, out, "\n"+testRelease.revision+"\n")

	flip := func(content []byte) []byte {
		changed := bytes.Clone(content)
		changed[len(changed)/2] ^= 1
		return changed
	}
	for _, name := range []string{"slicecast_v1.2.3-test_linux_amd64.tar.gz", "slicecast-1.2.3-test.tgz", imagesFile, sumsFile, signatureFile} {
		out, err := verify(t, name, flip)
		require.Error(t, err, "%s: %s", name, out)
	}
	other, err := os.ReadFile(filepath.Join(secondRelease, publicKeyFile))
	require.NoError(t, err)
	out, err = verify(t, publicKeyFile, func([]byte) []byte { return other })
	require.Error(t, err, out)
	out, err = verify(t, provenanceFile, func(content []byte) []byte {
		var e dsse.Envelope
		require.NoError(t, json.Unmarshal(content, &e))
		statement, err := e.DecodeB64Payload()
		require.NoError(t, err)
		forged := bytes.Replace(statement, []byte(testRelease.revision), []byte(strings.Repeat("0", len(testRelease.revision))), 1)
		e.Payload = base64.StdEncoding.EncodeToString(forged)
		changed, err := json.Marshal(e)
		require.NoError(t, err)
		return changed
	})
	require.Error(t, err, out)
}

// TestProvenance reads the provenance with the libraries of its formats. Its subjects are all files
// of the checksums, and all images.
func TestProvenance(t *testing.T) {
	public, err := os.ReadFile(filepath.Join(firstRelease, publicKeyFile))
	require.NoError(t, err)
	key, err := signerverifier.LoadKey(public)
	require.NoError(t, err)
	verifier, err := signerverifier.NewECDSASignerVerifierFromSSLibKey(key)
	require.NoError(t, err)
	content, err := os.ReadFile(filepath.Join(firstRelease, provenanceFile))
	require.NoError(t, err)
	var envelope dsse.Envelope
	require.NoError(t, json.Unmarshal(content, &envelope))
	envelopes, err := dsse.NewEnvelopeVerifier(verifier)
	require.NoError(t, err)
	_, err = envelopes.Verify(t.Context(), &envelope)
	require.NoError(t, err)

	payload, err := envelope.DecodeB64Payload()
	require.NoError(t, err)
	var statement attestation.Statement
	require.NoError(t, protojson.Unmarshal(payload, &statement))
	require.NoError(t, statement.Validate())
	require.Equal(t, "https://slsa.dev/provenance/v1", statement.GetPredicateType())
	var p provenancev1.Provenance
	require.NoError(t, convert(statement.GetPredicate(), &p))
	require.NoError(t, p.Validate())
	require.Equal(t, testRelease.revision, p.GetBuildDefinition().GetResolvedDependencies()[0].GetDigest()["gitCommit"])

	want := make(map[string]string)
	sums, err := os.ReadFile(filepath.Join(firstRelease, sumsFile))
	require.NoError(t, err)
	for line := range strings.Lines(string(sums)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		want[name] = sum
	}
	list, err := os.ReadFile(filepath.Join(firstRelease, imagesFile))
	require.NoError(t, err)
	require.Equal(t, len(images), strings.Count(string(list), "\n"))
	for line := range strings.Lines(string(list)) {
		name, digest, _ := strings.Cut(strings.TrimSpace(line), "@sha256:")
		want[name] = digest
	}
	got := make(map[string]string)
	for _, s := range statement.GetSubject() {
		got[s.GetName()] = s.GetDigest()["sha256"]
	}
	require.Equal(t, want, got)
}

// TestRealReleasesAreChecked requires that a release is refused unless its sources and its key are
// those that users expect.
func TestRealReleasesAreChecked(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	shell := func(script string) {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "sh", "-e", "-c", script).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	t.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
	shell(`git init -q .; git config user.name x; git config user.email x@example.com
		openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem
		openssl genpkey -algorithm ed25519 -out ed.pem
		openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes256 -pass pass:secret -out encrypted.pem
		printf '*.pem\n' >.gitignore; printf '# Changelog\n\n## [0.1.0] - not released yet\n' >CHANGELOG.md; git add .; git commit -qm first`)
	shell("git tag of-another-kind")
	described, err := newRelease(t.Context(), "")
	require.NoError(t, err)
	require.Regexp(t, "^[0-9a-f]{12}$", described.version)
	r := release{version: "v0.1.0"}
	refused := func(o options, says string) {
		t.Helper()
		require.ErrorContains(t, r.build(t.Context(), o), says)
	}
	refused(options{key: "none.pem"}, "--key: open none.pem")
	refused(options{key: ".gitignore"}, "not an unencrypted private key")
	refused(options{key: "encrypted.pem"}, "not an unencrypted private key")
	refused(options{key: "ed.pem"}, "not an ECDSA key")
	refused(options{key: "key.pem", platforms: []string{"linux/amd64"}}, "--platforms is for dry runs")
	refused(options{platforms: []string{"plan9/386"}}, "choose from darwin/amd64, darwin/arm64, linux/amd64")
	refused(options{key: "key.pem"}, "does not have the tag v0.1.0")
	shell("git tag v0.1.0")
	described, err = newRelease(t.Context(), "")
	require.NoError(t, err)
	require.Equal(t, "v0.1.0", described.version)
	shell("touch new")
	refused(options{key: "key.pem"}, "not committed")
	shell("rm new")
	refused(options{key: "key.pem"}, "CHANGELOG.md has no section of v0.1.0")
	shell(`printf '\n## [0.1.0] - 2026-12-01\n' >>CHANGELOG.md; git commit -qam second; git tag -f v0.1.0`)
	refused(options{key: "key.pem"}, "commit the public key")
	shell(`mkdir docs; openssl ec -in key.pem -pubout -out docs/slicecast-release.pub; git add .; git commit -qm third; git tag -f v0.1.0`)
	s, err := options{key: "key.pem"}.signer(t.Context(), r)
	require.NoError(t, err)
	require.NotNil(t, s)
	shell(`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem`)
	refused(options{key: "key.pem"}, "does not belong to docs/slicecast-release.pub")
}

// TestFailedRunsDoNotStandInTheWay requires that a folder is reused after a run that failed, and
// that a folder with other files is not.
func TestFailedRunsDoNotStandInTheWay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "release")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 {
		require.ErrorContains(t, testRelease.build(ctx, options{dir: dir}), "go build ./server")
		require.FileExists(t, filepath.Join(dir, sumsFile))
	}
	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "thesis.txt"), nil, 0o600))
	require.ErrorContains(t, testRelease.build(ctx, options{dir: other}), "name another folder")
}

// TestArchivesKeepTheOrder requires that an archive does not depend on the order of a map.
func TestArchivesKeepTheOrder(t *testing.T) {
	content := make(files)
	for _, name := range strings.Split("j i h g f e d c b a", " ") {
		content[name] = file{kind: tar.TypeReg, mode: 0o644, content: []byte(name)}
	}
	packed, err := pack(content, platform{os: "linux"}, testRelease.created)
	require.NoError(t, err)
	for range 10 {
		again, err := pack(content, platform{os: "linux"}, testRelease.created)
		require.NoError(t, err)
		require.Equal(t, packed, again)
	}
}
