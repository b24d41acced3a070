// Package tlsfiles makes TLS of PEM files and follows them: certificates, keys and CAs are replaced without a restart.
//
//   - Each handshake, of a server and of a client, goes by what the files hold at that time: a certificate that is renewed
//     is shown, and a CA that is withdrawn is no longer trusted, from the next handshake on.
//   - While the files can't be used (one is missing or torn, or a certificate and its key don't match yet because one of
//     them is still being replaced), it is what they held before, all of it. That is logged at most once a minute.
//   - Connections that are open stay.
package tlsfiles

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// logInterval is how often files that can't be used are logged: a fleet of peers that connect must not fill the disk.
const logInterval = time.Minute

// Files are the paths of PEM files.
type Files struct {
	// Certificate, with its chain, and PrivateKey are one's own. Clients may do without: both are "" then.
	Certificate, PrivateKey string
	// CA holds the certificates that the other side's must come from. "": a server asks for none, a client goes by the
	// system's.
	CA string
}

// Follower is the TLS that some files make now. It is safe for any number of goroutines.
type Follower struct {
	files  Files
	log    *slog.Logger
	loaded atomic.Pointer[loaded]
	warn   rate.Sometimes
}

// loaded is what the files held.
type loaded struct {
	pem          [3][]byte
	certificates []tls.Certificate
	ca           *x509.CertPool // nil: none
}

// Follow reads the files, which must be good now; what is wrong with them later is logged.
func Follow(files Files, log *slog.Logger) (*Follower, error) {
	f := &Follower{files: files, log: log, warn: rate.Sometimes{Interval: logInterval}}
	first, err := files.load(nil)
	if err != nil {
		return nil, err
	}
	f.loaded.Store(first)
	return f, nil
}

// Server gives the configuration for a listener: whether client certificates are asked for, and the listener's protocols
// (ALPN). Certificates of clients are verified against the CA; without one, none is good.
func (f *Follower) Server(clients tls.ClientAuthType, protocols ...string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			now := f.current()
			clientCAs := now.ca
			if clientCAs == nil {
				clientCAs = x509.NewCertPool() // nil would mean the system's
			}
			return &tls.Config{
				MinVersion:   tls.VersionTLS13,
				NextProtos:   protocols,
				Certificates: now.certificates,
				ClientCAs:    clientCAs,
				ClientAuth:   clients,
				// A resumed session would not be verified again, and a CA that is withdrawn counts from the next handshake.
				SessionTicketsDisabled: true,
			}, nil
		},
	}
}

// current gives what the files hold. It compares their content, some microseconds' work beside a handshake's, because times
// and sizes can stay equal when the content does not.
func (f *Follower) current() *loaded {
	have := f.loaded.Load()
	now, err := f.files.load(have)
	if err != nil {
		f.warn.Do(func() {
			f.log.Warn("TLS files can't be used; what they held before stays in use", "err", err)
		})
		return have
	}
	if now != have && f.loaded.CompareAndSwap(have, now) {
		f.log.Info("TLS files have changed and are in use", "certificate", f.files.Certificate, "ca", f.files.CA)
	}
	return now
}

// load reads the files; it gives back have if that is what they hold.
func (f Files) load(have *loaded) (*loaded, error) {
	now := &loaded{}
	for i, path := range []string{f.Certificate, f.PrivateKey, f.CA} {
		if path == "" {
			continue
		}
		var err error
		if now.pem[i], err = os.ReadFile(path); err != nil {
			return nil, fmt.Errorf("TLS: %w", err)
		}
	}
	if have != nil && slices.EqualFunc(now.pem[:], have.pem[:], bytes.Equal) {
		return have, nil
	}
	if f.Certificate != "" || f.PrivateKey != "" {
		_, err := decode(now.pem[0])
		var certificate tls.Certificate
		if err == nil {
			certificate, err = tls.X509KeyPair(now.pem[0], now.pem[1])
		}
		if err != nil {
			return nil, fmt.Errorf("TLS certificate %q with key %q: %w", f.Certificate, f.PrivateKey, err)
		}
		now.certificates = []tls.Certificate{certificate}
	}
	if f.CA != "" {
		var err error
		if now.ca, err = pool(now.pem[2]); err != nil {
			return nil, fmt.Errorf("TLS CA %q: %w", f.CA, err)
		}
	}
	return now, nil
}

// pool gives the certificates of a CA file.
func pool(file []byte) (*x509.CertPool, error) {
	blocks, err := decode(file)
	if err != nil {
		return nil, err
	}
	p, empty := x509.NewCertPool(), true
	for _, b := range blocks {
		if b.Type != "CERTIFICATE" {
			continue
		}
		certificate, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			return nil, err
		}
		p.AddCert(certificate)
		empty = false
	}
	if empty {
		return nil, errors.New("it has no certificate in PEM form")
	}
	return p, nil
}

// decode gives all that a PEM file holds. A decoder passes over what is no whole block; but in a file that is still being
// written this would be a CA, or a link of a chain, that is silently missing.
func decode(file []byte) ([]*pem.Block, error) {
	var blocks []*pem.Block
	for block, rest := pem.Decode(file); block != nil; block, rest = pem.Decode(rest) {
		blocks = append(blocks, block)
	}
	if begun := bytes.Count(file, []byte("-----BEGIN ")); begun != len(blocks) {
		return nil, fmt.Errorf("%d of its %d PEM blocks are not whole", begun-len(blocks), begun)
	}
	return blocks, nil
}
