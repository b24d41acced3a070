// These tests prove that two dry runs of a release make the same bytes, except for what is signed.
// The archives have the programs and files that users install, with SBOMs. The commands of
// docs/releasing.md, which run openssl, accept what is signed and nothing else.
package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/json"
	"fmt"
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
// keys differ, and with them what is signed. So neither settings of a machine take part, nor files
// that git ignores.
func TestTwoBuildsAreTheSame(t *testing.T) {
	signed := map[string]bool{"/" + signatureFile: true, "/" + provenanceFile: true}
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

// verify runs the commands that users run, with the key of the first release, on a copy of these
// files that edit has changed. The copy consists of links, which edit replaces.
func verify(t *testing.T, names []string, edit func(dir string)) (string, error) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		require.NoError(t, os.Symlink(filepath.Join(firstRelease, name), filepath.Join(dir, name)))
	}
	edit(dir)
	out, err := exec.CommandContext(t.Context(), "./verify.sh", dir, dryRunKey(firstRelease)).CombinedOutput()
	return string(out), err
}

// replace replaces a file of a copy.
func replace(t *testing.T, dir, name string, content []byte) {
	t.Helper()
	require.NoError(t, os.RemoveAll(filepath.Join(dir, name)))
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o600))
}

// TestVerification requires that the commands accept each file of the release, and nothing else,
// and that verify.sh notices a file that is missing.
func TestVerification(t *testing.T) {
	read := func(dir, name string) []byte {
		content, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		return content
	}
	sums := read(firstRelease, sumsFile)
	all, err := filepath.Glob(firstRelease + "/*")
	require.NoError(t, err)
	for i := range all {
		all[i] = filepath.Base(all[i])
	}
	out, err := verify(t, all, func(string) {})
	require.NoError(t, err, out)
	for line := range strings.Lines(string(sums)) {
		require.Contains(t, out, "Verified OK\n"+line+"Verified OK\n"+testRelease.revision+"\n")
	}
	require.Equal(t, bytes.Count(sums, []byte("\n")), strings.Count(out, testRelease.revision))

	out, err = verify(t, all, func(dir string) { require.NoError(t, os.Remove(filepath.Join(dir, testRelease.imagesFile()))) })
	require.Error(t, err, out)
	require.Contains(t, out, testRelease.imagesFile()+": missing, and SHA256SUMS lists it\n")
	out, err = verify(t, nil, func(string) {})
	require.Error(t, err, out)
	require.Contains(t, out, "SHA256SUMS is missing or empty\n")

	const archive, chart = "slicecast_v1.2.3-test_linux_amd64.tar.gz", "slicecast-1.2.3-test.tgz"
	flip := func(name string) func(string) {
		return func(dir string) {
			content := read(dir, name)
			content[len(content)/2] ^= 1
			replace(t, dir, name, content)
		}
	}
	// An attacker has a key, and signs everything with it.
	other, err := generateSigner()
	require.NoError(t, err)
	forged := func(dir string, s *signer, sums []byte) {
		require.NoError(t, os.Remove(filepath.Join(dir, signatureFile)))
		require.NoError(t, os.Remove(filepath.Join(dir, provenanceFile)))
		require.NoError(t, s.sign(t.Context(), dir, testRelease, sums, []*attestation.ResourceDescriptor{
			{Name: archive, Digest: map[string]string{"sha256": hash(read(firstRelease, archive))}},
		}))
	}
	for change, edit := range map[string]func(dir string){
		"an archive":    flip(archive),
		"the chart":     flip(chart),
		"the images":    flip(testRelease.imagesFile()),
		"the sums":      flip(sumsFile),
		"the signature": flip(signatureFile),
		"two files swapped": func(dir string) {
			replace(t, dir, archive, read(firstRelease, chart))
			replace(t, dir, chart, read(firstRelease, archive))
		},
		"a truncated file": func(dir string) { replace(t, dir, archive, read(firstRelease, archive)[:1000]) },
		"an empty file":    func(dir string) { replace(t, dir, archive, nil) },
		"a file that is not listed": func(dir string) {
			replace(t, dir, "slicecast_v1.2.3-test_linux_riscv64.tar.gz", []byte("anything"))
		},
		"a file under another name": func(dir string) {
			replace(t, dir, "slicecast_v1.2.4_linux_amd64.tar.gz", read(firstRelease, archive))
		},
		"sums of another file": func(dir string) {
			replace(t, dir, sumsFile, append(bytes.Clone(sums), hash(nil)+"  empty\n"...))
			replace(t, dir, "empty", nil)
		},
		"a key beside the files": func(dir string) {
			forged(dir, other, sums)
			replace(t, dir, filepath.Base(publishedKey), other.public)
		},
		"provenance of another commit": func(dir string) {
			var e dsse.Envelope
			require.NoError(t, json.Unmarshal(read(firstRelease, provenanceFile), &e))
			statement, err := e.DecodeB64Payload()
			require.NoError(t, err)
			none := []byte(strings.Repeat("0", len(testRelease.revision)))
			e.Payload = base64.StdEncoding.EncodeToString(bytes.Replace(statement, []byte(testRelease.revision), none, 1))
			changed, err := json.Marshal(e)
			require.NoError(t, err)
			replace(t, dir, provenanceFile, changed)
		},
	} {
		out, err := verify(t, []string{archive, chart, testRelease.imagesFile(), sumsFile, signatureFile, provenanceFile}, edit)
		require.Error(t, err, "%s: %s", change, out)
		require.Contains(t, out, ": not verified\n", change)
	}

	// The statement is signed with the right key, and is about one file only.
	dir := t.TempDir()
	for _, name := range []string{archive, chart} {
		require.NoError(t, os.Symlink(filepath.Join(firstRelease, name), filepath.Join(dir, name)))
	}
	for _, name := range []string{signatureFile, provenanceFile} {
		replace(t, dir, name, nil)
	}
	sign := func(names ...string) {
		var sums []byte
		for _, name := range names {
			sums = fmt.Appendf(sums, "%s  %s\n", hash(read(dir, name)), name)
		}
		replace(t, dir, sumsFile, sums)
		forged(dir, other, sums)
	}
	sign(archive, chart)
	key := filepath.Join(t.TempDir(), "key.pub")
	require.NoError(t, os.WriteFile(key, other.public, 0o600))
	text, err := exec.CommandContext(t.Context(), "./verify.sh", dir, key).CombinedOutput()
	require.Error(t, err, string(text))
	require.Contains(t, string(text), chart+": not verified\n")
	require.NoError(t, os.Remove(filepath.Join(dir, chart)))
	sign(archive)
	text, err = exec.CommandContext(t.Context(), "./verify.sh", dir, key).CombinedOutput()
	require.NoError(t, err, string(text))
}

// TestTheKeyIsNotInTheRelease requires that a release has no key beside what it verifies, and that
// users have to name the key of a dry run.
func TestTheKeyIsNotInTheRelease(t *testing.T) {
	for _, dir := range []string{firstRelease, secondRelease} {
		keys, err := filepath.Glob(filepath.Join(dir, "*.pub"))
		require.NoError(t, err)
		require.Empty(t, keys)
		require.FileExists(t, dryRunKey(dir))
	}
	out, err := exec.CommandContext(t.Context(), clone+"/internal/tools/release/verify.sh", firstRelease).CombinedOutput()
	require.Error(t, err, string(out))
}

// TestProgramsHaveNoOtherSettings requires that the compiler recorded the settings of the release
// and no others.
func TestProgramsHaveNoOtherSettings(t *testing.T) {
	for _, release := range []string{firstRelease, secondRelease} {
		archive, err := os.Open(filepath.Join(release, "slicecast_v1.2.3-test_linux_amd64.tar.gz"))
		require.NoError(t, err)
		dir := t.TempDir()
		untar(t, dir, archive, "--gzip", "--strip-components=1")
		require.NoError(t, archive.Close())
		info, err := buildinfo.ReadFile(filepath.Join(dir, "bin/slicecast-agent"))
		require.NoError(t, err)
		require.Equal(t, runtime.Version(), info.GoVersion)
		settings := make(map[string]string)
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
		delete(settings, "DefaultGODEBUG") // what go.mod says
		require.Equal(t, map[string]string{
			"-buildmode": "exe", "-compiler": "gc", "-trimpath": "true", "CGO_ENABLED": "0", "GOOS": "linux", "GOARCH": "amd64", "GOAMD64": "v1",
		}, settings)
	}
}

// TestProvenance reads the provenance with the libraries of its formats. Its subjects are all files
// of the checksums, and all images.
func TestProvenance(t *testing.T) {
	public, err := os.ReadFile(dryRunKey(firstRelease))
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
	list, err := os.ReadFile(filepath.Join(firstRelease, testRelease.imagesFile()))
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
	refused := func(o options, says string) {
		t.Helper()
		r, err := newRelease(t.Context(), "v0.1.0")
		require.NoError(t, err)
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
	shell(`mkdir docs; openssl ec -in key.pem -pubout -out docs/slicecast-release.pub; echo >docs/releasing.md
		git add .; git commit -qm third; git tag -f v0.1.0`)
	refused(options{key: "key.pem"}, "does not name the key by its fingerprint")
	shell(`openssl ec -in key.pem -pubout -outform DER | sha256sum >docs/releasing.md; git commit -qam fourth; git tag -f v0.1.0`)
	s, err := options{key: "key.pem"}.signer()
	require.NoError(t, err)
	r, err := newRelease(t.Context(), "v0.1.0")
	require.NoError(t, err)
	remove, err := r.export(t.Context(), false)
	require.NoError(t, err)
	require.NoError(t, r.check(s))
	require.NoFileExists(t, filepath.Join(r.sources, "key.pem"), "git ignores it")
	remove()
	require.NoDirExists(t, r.sources)
	t.Run("another time", func(t *testing.T) {
		t.Setenv(epoch, "1")
		refused(options{key: "key.pem"}, "SOURCE_DATE_EPOCH is set")
	})
	shell(`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem`)
	refused(options{key: "key.pem"}, "does not belong to docs/slicecast-release.pub")
}

// TestFailedRunsDoNotStandInTheWay requires that a folder is reused after a run that failed, and
// that a folder with other files is not.
func TestFailedRunsDoNotStandInTheWay(t *testing.T) {
	t.Chdir(t.TempDir())
	out, err := exec.CommandContext(t.Context(), "sh", "-e", "-c",
		"git init -q .; git -c user.name=x -c user.email=x@example.com commit -q --allow-empty -m first").CombinedOutput()
	require.NoError(t, err, string(out))
	r, err := newRelease(t.Context(), "")
	require.NoError(t, err)
	dir := filepath.Join(t.TempDir(), "release")
	for range 2 {
		require.ErrorContains(t, r.build(t.Context(), options{dir: dir}), "go build ./server")
		require.FileExists(t, filepath.Join(dir, sumsFile))
	}
	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "thesis.txt"), nil, 0o600))
	require.ErrorContains(t, r.build(t.Context(), options{dir: other}), "name another folder")
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
