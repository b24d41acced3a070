// Package tlsfiles provides TLS from PEM files that may change: certificates, keys and CAs are
// replaced without a restart. The PEM may also come from elsewhere.
//
//  1. Each handshake of a server or client uses the current content of the files. From the next
//     handshake on, a renewed certificate is presented and a withdrawn CA is no longer trusted.
//  2. If the files are unusable, handshakes use the last usable content of all files. A file may be
//     missing or incomplete, or a certificate and its key may not match while one of them is still
//     to be replaced. Unusable files are logged at most once a minute.
//  3. Open connections are not affected. A server can close those whose client certificate
//     VerifyClient no longer accepts.
package tlsfiles

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// logInterval bounds how often unusable files are logged, because each of many connecting peers
// would cause a line.
const logInterval = time.Minute

// Files are the paths of PEM files.
type Files struct {
	// Certificate, which includes the chain, and PrivateKey are one's own. A client may have
	// neither; both are empty then.
	Certificate, PrivateKey string
	// CA holds the certificates that the peer's certificate must descend from. If it is empty, a
	// client uses the system's CAs and a server accepts no client certificates.
	CA string
}

// PEM is the content of Files; nil for each one that does not exist.
type PEM struct {
	Certificate, PrivateKey, CA []byte
}

// Follower provides TLS with the current content of files. Its methods are safe for concurrent use.
type Follower struct {
	// Now returns the time at which certificates are verified. nil means time.Now. It may be set
	// before the first handshake.
	Now func() time.Time

	names  Files // for messages
	read   func() (PEM, error)
	log    *slog.Logger
	loaded atomic.Pointer[loaded] // the last usable content; nil until there is one
	warn   rate.Sometimes
}

type loaded struct {
	PEM
	certificates []tls.Certificate
	ca           *x509.CertPool // nil if there is no CA file
	caEnd        time.Time      // the end of the CA that ends last; zero if there is no CA file
}

// Follow reads the files and returns their Follower. It returns an error if the files are unusable
// now; later errors are logged.
func Follow(files Files, log *slog.Logger) (*Follower, error) {
	f := follow(files, files.read, log)
	first, err := f.load(nil)
	if err != nil {
		return nil, err
	}
	f.loaded.Store(first)
	return f, nil
}

// FollowLater returns the Follower of files that may become usable later, which is logged.
// Handshakes fail until then. As long as there has never been a file of CAs, those that early
// returns count, if it is not nil and returns any.
func FollowLater(files Files, early func() []byte, log *slog.Logger) *Follower {
	var seen atomic.Bool // the file of CAs
	f := follow(files, func() (PEM, error) {
		_, err := os.Stat(files.CA)
		if early == nil || !errors.Is(err, fs.ErrNotExist) {
			seen.Store(true)
		}
		var cas []byte
		if !seen.Load() {
			cas = early()
		}
		if cas == nil {
			return files.read()
		}
		content, err := Files{Certificate: files.Certificate, PrivateKey: files.PrivateKey}.read()
		content.CA = cas
		return content, err
	}, log)
	if _, err := f.refresh(); err != nil {
		log.Warn("Cannot use the TLS files, trying again with each connection", "err", err)
	}
	return f
}

// FollowFunc returns a Follower of what a function returns, which each handshake calls. Handshakes
// fail as long as it has never returned anything usable. The name is for messages.
func FollowFunc(name string, read func() (PEM, error), log *slog.Logger) *Follower {
	return follow(Files{Certificate: name, PrivateKey: name, CA: name}, read, log)
}

func follow(names Files, read func() (PEM, error), log *slog.Logger) *Follower {
	return &Follower{names: names, read: read, log: log, warn: rate.Sometimes{Interval: logInterval}}
}

// Server returns the configuration for a listener. clients says whether the server asks for client
// certificates, protocols are those that it accepts (ALPN). A handshake is only completed with a
// client certificate that descends from the CA, or without one. So the peer certificates of its
// state are verified, although crypto/tls reports no verified chains. Without a CA no client
// certificate is valid.
func (f *Follower) Server(clients bool, protocols ...string) *tls.Config {
	config := Config()
	config.NextProtos = protocols
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		now, err := f.refresh()
		if err != nil {
			return nil, err
		}
		config := Config()
		config.NextProtos, config.Certificates, config.Time = protocols, now.certificates, f.Now
		// A resumed session would not be verified again, but a withdrawn CA must not be trusted
		// from the next handshake on.
		config.SessionTicketsDisabled = true
		if clients {
			config.ClientAuth, config.ClientCAs = tls.RequestClientCert, now.clientCAs()
			config.VerifyConnection = func(state tls.ConnectionState) error {
				if len(state.PeerCertificates) == 0 {
					return nil
				}
				// The CAs may have changed since the client's first message.
				return f.VerifyClient(state.PeerCertificates)
			}
		}
		return config, nil
	}
	return config
}

// VerifyClient returns an error unless the CAs accept a client's certificate now. The chain begins
// with that certificate.
func (f *Follower) VerifyClient(chain []*x509.Certificate) error {
	now, err := f.refresh()
	if err != nil {
		return err
	}
	_, err = verify(chain, x509.VerifyOptions{
		Roots: now.clientCAs(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, f.Now)
	return err
}

// CAs returns the CAs of client certificates. It returns the same pool until they change, and nil
// if there are none.
func (f *Follower) CAs() *x509.CertPool {
	now, err := f.refresh()
	if err != nil {
		return nil
	}
	return now.ca
}

// clientCAs returns the CAs of client certificates for crypto/x509.
func (l *loaded) clientCAs() *x509.CertPool {
	if l.ca == nil {
		return x509.NewCertPool() // nil would mean the system's CAs
	}
	return l.ca
}

// Ends returns when the certificate ends, and when the CA that lasts longest does. They are zero if
// there is no such file, or if it has never been usable.
func (f *Follower) Ends() (certificate, ca time.Time) {
	now, err := f.refresh()
	if err != nil {
		return time.Time{}, time.Time{}
	}
	if len(now.certificates) > 0 {
		certificate = now.certificates[0].Leaf.NotAfter
	}
	return certificate, now.caEnd
}

// refresh reads the files and returns their content, or the last usable one. It returns an error if
// there has never been a usable one. It compares the content, because time and size of a file can
// stay equal when its content changes. Reading the files takes microseconds, little compared to a
// handshake.
func (f *Follower) refresh() (*loaded, error) {
	have := f.loaded.Load()
	now, err := f.load(have)
	if err != nil {
		if have == nil {
			return nil, err
		}
		f.warn.Do(func() {
			f.log.Warn("Cannot reload the TLS files, using their previous content", "err", err)
		})
		return have, nil
	}
	if now != have && f.loaded.CompareAndSwap(have, now) && have != nil {
		f.log.Info("Reloaded the TLS files", "certificate", f.names.Certificate, "ca", f.names.CA)
	}
	return now, nil
}

// read returns the content of the files.
func (f Files) read() (out PEM, err error) {
	read := func(path string) (content []byte) {
		if path != "" && err == nil {
			content, err = os.ReadFile(path)
		}
		return content
	}
	out = PEM{Certificate: read(f.Certificate), PrivateKey: read(f.PrivateKey), CA: read(f.CA)}
	if err != nil {
		return PEM{}, fmt.Errorf("read TLS files: %w", err)
	}
	return out, nil
}

// load reads the files. It returns have if the content is still the same.
func (f *Follower) load(have *loaded) (*loaded, error) {
	content, err := f.read()
	if err != nil {
		return nil, err
	}
	if have != nil && bytes.Equal(content.Certificate, have.Certificate) &&
		bytes.Equal(content.PrivateKey, have.PrivateKey) && bytes.Equal(content.CA, have.CA) {
		return have, nil
	}
	now := &loaded{PEM: content}
	if f.names.Certificate != "" || f.names.PrivateKey != "" {
		_, err := decode(content.Certificate)
		var certificate tls.Certificate
		if err == nil {
			certificate, err = tls.X509KeyPair(content.Certificate, content.PrivateKey)
		}
		if err != nil {
			return nil, fmt.Errorf("load TLS certificate %q with key %q: %w", f.names.Certificate, f.names.PrivateKey, err)
		}
		now.certificates = []tls.Certificate{certificate}
	}
	switch {
	case f.names.CA == "":
	case have != nil && bytes.Equal(content.CA, have.CA):
		now.ca, now.caEnd = have.ca, have.caEnd
	default:
		if now.ca, now.caEnd, err = pool(content.CA); err != nil {
			return nil, fmt.Errorf("load CA certificates %q: %w", f.names.CA, err)
		}
	}
	return now, nil
}

// pool returns the certificates of a file, and when the last one ends.
func pool(file []byte) (p *x509.CertPool, end time.Time, err error) {
	blocks, err := decode(file)
	if err != nil {
		return nil, time.Time{}, err
	}
	p = x509.NewCertPool()
	for _, b := range blocks {
		if b.Type != "CERTIFICATE" {
			continue
		}
		certificate, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, time.Time{}, err
		}
		p.AddCert(certificate)
		if certificate.NotAfter.After(end) {
			end = certificate.NotAfter
		}
	}
	if end.IsZero() {
		return nil, time.Time{}, errors.New("the file contains no PEM certificate")
	}
	return p, end, nil
}

// decode returns all blocks of a PEM file. It returns an error for incomplete blocks, which
// pem.Decode skips: in a file that is still being written, a CA or a link of a chain would silently
// be missing.
func decode(file []byte) ([]*pem.Block, error) {
	var blocks []*pem.Block
	for block, rest := pem.Decode(file); block != nil; block, rest = pem.Decode(rest) {
		blocks = append(blocks, block)
	}
	if begun := bytes.Count(file, []byte("-----BEGIN ")); begun != len(blocks) {
		return nil, fmt.Errorf("%d of %d PEM blocks are incomplete", begun-len(blocks), begun)
	}
	return blocks, nil
}
