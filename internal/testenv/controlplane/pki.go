package controlplane

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/testca"
)

// pki is the certificate authority of one control plane, with the files that its components read.
type pki struct {
	dir string
	ca  *testca.CA
}

// Names in the certificate of every API server: a name, and the cluster IP of the Service
// kubernetes, at which pods reach it.
const (
	serverName = "kubernetes.default.svc"
	clusterIP  = "10.96.0.1"
)

// caKey is the name of the file with the authority's private key. Processes that borrow the control
// plane issue certificates with it.
const caKey = "ca.key"

// newPKI creates an authority, a serving certificate for loopback and address, and the key that
// signs ServiceAccount tokens. The key comes with a certificate, which the API server accepts in
// place of the public key.
func newPKI(dir string, address netip.Addr) (*pki, error) {
	authority, err := testca.New()
	if err != nil {
		return nil, err
	}
	if _, err := authority.WriteCA(dir); err != nil {
		return nil, err
	}
	key, err := authority.KeyPEM()
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, caKey), key, 0o600); err != nil {
		return nil, err
	}
	serving, err := authority.Server(serverName, clusterIP, "localhost", loopback.String(), "::1", address.String())
	if err != nil {
		return nil, err
	}
	if _, _, err := testca.Write(dir, "serving", serving); err != nil {
		return nil, err
	}
	p := &pki{dir, authority}
	return p, p.newTokenKey()
}

func (p *pki) newTokenKey() error {
	tokens, err := p.ca.Client("service-accounts")
	if err != nil {
		return err
	}
	_, _, err = testca.Write(p.dir, "service-accounts", tokens)
	return err
}

// RotateServiceAccountKey creates a new key for ServiceAccount tokens. The API server uses it from
// its next start. If keepOld is true, the API server still accepts tokens of the earlier keys.
func (cp *ControlPlane) RotateServiceAccountKey(keepOld bool) error {
	public := cp.pki.file("service-accounts.crt")
	old, err := os.ReadFile(public)
	if err != nil {
		return err
	}
	if err := cp.pki.newTokenKey(); err != nil || !keepOld {
		return err
	}
	now, err := os.ReadFile(public)
	if err != nil {
		return err
	}
	return os.WriteFile(public, append(now, old...), 0o600)
}

func (p *pki) file(name string) string { return filepath.Join(p.dir, name) }

func (p *pki) client(user string, groups []string) (cert, key []byte) {
	c, err := p.ca.Client(user, groups...)
	if err == nil {
		cert, key, err = ca.EncodePEM(c)
	}
	if err != nil {
		panic(err) // possible only if the source of random numbers is broken
	}
	return cert, key
}

// WriteKubeconfig writes config as a kubeconfig file.
func (*ControlPlane) WriteKubeconfig(path string, config *rest.Config) error {
	const name = "slicecast-test"
	kubeconfig := clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{name: {
			Server:                   config.Host,
			TLSServerName:            config.ServerName,
			CertificateAuthorityData: config.CAData,
		}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{name: {
			ClientCertificateData: config.CertData,
			ClientKeyData:         config.KeyData,
		}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}
	if err := clientcmd.WriteToFile(kubeconfig, path); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}
