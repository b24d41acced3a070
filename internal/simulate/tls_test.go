// This file is the cluster's certificates, which end and are renewed.
package simulate

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/internal/ca"
	"github.com/slicecast/slicecast/internal/testca"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
)

// lifetime is how long certificates last, and soon how long those do that are about to end.
const lifetime, soon = 30 * 24 * time.Hour, 20 * time.Second

// pki issues the certificates of a cluster. It exists if the cluster uses TLS.
type pki struct {
	world     *world
	ca        *ca.CA
	directory string // for the files of servers
	ending    bool   // some certificate does not last

	mu      sync.Mutex // guards the fields below
	clients map[string]tlsfiles.PEM
	clocks  map[string]clock // of clients and servers whose clocks are wrong
}

// clock is a clock that was set wrongly, and that may run too fast or too slowly. Clients and
// servers verify each other's certificates by theirs, and a server ends a stream when the client's
// certificate ends by its own. Nothing else between them depends on the time of day: times on the
// wire are durations, or those of the server that sent them.
type clock struct {
	set   time.Time     // when it was set
	ahead time.Duration // by how much it was ahead then
	drift float64       // by how many seconds more it is ahead after each second
}

func (c clock) now() time.Time {
	now := time.Now()
	return now.Add(c.ahead + time.Duration(c.drift*float64(now.Sub(c.set))))
}

// clockOf returns the clock of a client or a server. It follows the clock's changes.
func (p *pki) clockOf(name string) func() time.Time {
	return func() time.Time {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.clocks[name].now()
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newPKI(w *world, directory string) *pki {
	return &pki{
		world: w, directory: directory, clients: make(map[string]tlsfiles.PEM), clocks: make(map[string]clock),
		ca: must(ca.New("simulated", ca.Validity{NotBefore: time.Now(), NotAfter: time.Now().Add(10 * lifetime)})),
	}
}

func (p *pki) issue(template *x509.Certificate, life time.Duration) tls.Certificate {
	return must(p.ca.Issue(template, ca.Validity{NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(life)}))
}

// renewServer writes another certificate of a server, and returns the names of its files.
func (p *pki) renewServer(s *server, life time.Duration) *tlsfiles.Files {
	c, k, err := testca.Write(p.directory, s.name, p.issue(ca.Serving(s.host()), life))
	if err != nil {
		panic(err)
	}
	return &tlsfiles.Files{Certificate: c, PrivateKey: k, CA: must(p.testCA().WriteCA(p.directory))}
}

// testCA returns the CA in the form that writes files.
func (p *pki) testCA() *testca.CA {
	cert, key, err := p.ca.PEM()
	if err != nil {
		panic(err)
	}
	return must(testca.Parse(cert, key))
}

// renewClient issues another certificate of a client: that of a node has its name, and those of
// relays and operators say what they are.
func (p *pki) renewClient(name string, life time.Duration) {
	subject := pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}
	switch name {
	case relayName:
		subject = pkix.Name{CommonName: name, Organization: []string{"slicecast:relays"}}
	case operatorName:
		subject = pkix.Name{CommonName: name, Organization: []string{"system:masters"}}
	}
	cert, key, err := ca.EncodePEM(p.issue(&x509.Certificate{
		Subject: subject, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, life))
	if err != nil {
		panic(err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clients[name] = tlsfiles.PEM{Certificate: cert, PrivateKey: key, CA: p.testCA().PEM()}
}

// relayName and operatorName are the names of clients that are no nodes.
const relayName, operatorName = "relay", "operator"

// credentials returns those of a client, which follow its certificate.
func (p *pki) credentials(name string) credentials.TransportCredentials {
	p.mu.Lock()
	_, known := p.clients[name]
	p.mu.Unlock()
	if !known {
		p.renewClient(name, lifetime)
	}
	read := func() (tlsfiles.PEM, error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.clients[name], nil
	}
	follower := tlsfiles.FollowFunc("certificate of "+name, read, slog.New(slog.DiscardHandler))
	follower.Now = p.clockOf(name)
	if name == operatorName { // its calls are not those that connections of wire.Protocol serve
		return follower.ClientCredentials()
	}
	return follower.ClientCredentials(wire.Protocol)
}

// credentials are those of gRPC clients.
func (w *world) credentials(name string) []grpc.DialOption {
	if w.pki == nil {
		return plaintext
	}
	return []grpc.DialOption{grpc.WithTransportCredentials(w.pki.credentials(name))}
}

// renewCertificates issues certificates that last, if some do not.
func (w *world) renewCertificates() {
	if w.pki == nil || !w.pki.ending {
		return
	}
	w.pki.ending = false
	for _, s := range w.servers {
		w.pki.renewServer(s, lifetime)
	}
	w.pki.mu.Lock()
	names := slices.Sorted(maps.Keys(w.pki.clients)) // also those that nodes may get again
	w.pki.mu.Unlock()
	for _, name := range names {
		w.pki.renewClient(name, lifetime)
	}
}

// setClocks sets all clocks to the right time.
func (w *world) setClocks() {
	if w.pki == nil {
		return
	}
	w.pki.mu.Lock()
	defer w.pki.mu.Unlock()
	clear(w.pki.clocks)
}

// setClock makes the clock of a node, of the relays' clients or of a server wrong: by minutes, by
// more than a certificate lasts, or more and more.
func (w *world) setClock(s step) string {
	if w.pki == nil {
		return ""
	}
	name := relayName
	switch s.b & 3 {
	case 0:
	case 1:
		name = pick(w.servers, s.a).name
	default:
		name = pick(w.nodes, s.a).name
	}
	c := clock{
		set:   time.Now(),
		ahead: pick([]time.Duration{0, -2 * time.Minute, 2 * time.Minute, -2 * lifetime, 2 * lifetime}, s.b>>2),
		drift: pick([]float64{0, -0.5, 0.5, 30_000}, s.c),
	}
	w.pki.mu.Lock()
	defer w.pki.mu.Unlock()
	w.pki.clocks[name] = c
	return fmt.Sprintf("the clock of %s is set %v ahead and gains %v s a second", name, c.ahead, c.drift)
}

// endCertificate issues a certificate of a server or a client that is about to end.
func (w *world) endCertificate(s step) string {
	if w.pki == nil {
		return ""
	}
	w.pki.ending = true
	switch s.b % 4 {
	case 0:
		w.pki.renewClient(relayName, soon)
		return "the certificate of relays is about to end"
	case 1:
		o := pick(w.servers, s.a)
		w.pki.renewServer(o, soon)
		return fmt.Sprintf("the certificate of %s is about to end", o.name)
	default:
		n := pick(w.nodes, s.a)
		w.pki.renewClient(n.name, soon)
		return fmt.Sprintf("the certificate of %s is about to end", n.name)
	}
}

func (w *world) renewSome(step) string {
	if w.pki == nil {
		return ""
	}
	w.renewCertificates()
	return "all certificates are renewed"
}
