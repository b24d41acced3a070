package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	provenancev1 "github.com/in-toto/attestation/go/predicates/provenance/v1"
	attestation "github.com/in-toto/attestation/go/v1"
	"github.com/secure-systems-lab/go-securesystemslib/dsse"
	"github.com/secure-systems-lab/go-securesystemslib/signerverifier"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// The files of a release that are about its other files.
const (
	sumsFile       = "SHA256SUMS"
	signatureFile  = "SHA256SUMS.sig"
	provenanceFile = "provenance.intoto.json"
)

// publishedKey is the public key of releases, in the repository. It is the only one that users
// trust, so no release has a key beside what the key verifies. keyPage names it by its fingerprint.
const (
	publishedKey = "docs/slicecast-release.pub"
	keyPage      = "docs/releasing.md"
)

// dryRunKey returns the path of the public key of a dry run, which is beside the folder of the dry
// run.
func dryRunKey(dir string) string { return filepath.Clean(dir) + ".dry-run.pub" }

// payloadType is the type of in-toto statements in an envelope.
const payloadType = "application/vnd.in-toto+json"

// signer signs with an ECDSA key of the curve P-256, which openssl and cosign verify, too.
type signer struct {
	*signerverifier.ECDSASignerVerifier
	public      []byte // PEM
	fingerprint string // the SHA-256 of the public key in DER, in hexadecimal digits
}

// newSigner reads a private key, as PKCS #8 in PEM.
func newSigner(path string) (*signer, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--key: %w", err)
	}
	s, err := parseSigner(text)
	if err != nil {
		return nil, fmt.Errorf("--key=%s: %w: make a key as docs/releasing.md says", path, err)
	}
	return s, nil
}

// generateSigner returns a signer with a new key, which is kept nowhere.
func generateSigner() (*signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return parseSigner(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

func parseSigner(text []byte) (*signer, error) {
	block, _ := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, errors.New("the file is not an unencrypted private key (PKCS #8 in PEM)")
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	private, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || private.Curve != elliptic.P256() {
		return nil, errors.New("the key is not an ECDSA key of the curve P-256")
	}
	key, err := signerverifier.LoadKey(text)
	if err != nil {
		return nil, err
	}
	s, err := signerverifier.NewECDSASignerVerifierFromSSLibKey(key)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKIXPublicKey(&private.PublicKey)
	if err != nil {
		return nil, err
	}
	return &signer{s, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), hash(der)}, nil
}

// sign writes the signature of the checksums, and the signed provenance.
func (s *signer) sign(ctx context.Context, dir string, r release, sums []byte, subjects []*attestation.ResourceDescriptor) error {
	signature, err := s.Sign(ctx, sums)
	if err != nil {
		return err
	}
	statement, err := r.provenance(subjects)
	if err != nil {
		return err
	}
	envelopes, err := dsse.NewEnvelopeSigner(s)
	if err != nil {
		return err
	}
	envelope, err := envelopes.SignPayload(ctx, payloadType, statement)
	if err != nil {
		return err
	}
	provenance, err := json.Marshal(envelope)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{signatureFile: signature, provenanceFile: provenance} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// provenance returns an in-toto statement with the predicate of SLSA v1: which sources the subjects
// were built from, and how.
func (r release) provenance(subjects []*attestation.ResourceDescriptor) ([]byte, error) {
	parameters, err := structpb.NewStruct(map[string]any{"version": r.version})
	if err != nil {
		return nil, err
	}
	p := &provenancev1.Provenance{
		BuildDefinition: &provenancev1.BuildDefinition{
			BuildType: source + "/blob/main/docs/releasing.md#provenance", ExternalParameters: parameters,
			ResolvedDependencies: []*attestation.ResourceDescriptor{
				{Uri: "git+" + source, Digest: map[string]string{"gitCommit": r.revision}},
				{Uri: "https://go.dev/dl/", Name: runtime.Version()},
			},
		},
		RunDetails: &provenancev1.RunDetails{Builder: &provenancev1.Builder{Id: source + "/blob/main/docs/releasing.md#builder"}},
	}
	if err := p.Validate(); err != nil {
		return nil, err
	}
	predicate := new(structpb.Struct)
	if err := convert(p, predicate); err != nil {
		return nil, err
	}
	statement := &attestation.Statement{
		Type: attestation.StatementTypeUri, Subject: subjects, PredicateType: "https://slsa.dev/provenance/v1", Predicate: predicate,
	}
	if err := statement.Validate(); err != nil {
		return nil, err
	}
	return protojson.Marshal(statement)
}

// convert converts a message to another type with the same form in JSON.
func convert(from, to proto.Message) error {
	text, err := protojson.Marshal(from)
	if err != nil {
		return err
	}
	return protojson.Unmarshal(text, to)
}
