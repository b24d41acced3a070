package auth

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"

	"golang.org/x/time/rate"
)

// TLSFiles are the PEM files that the server's TLS is made of.
type TLSFiles struct {
	// Certificate (chain) and PrivateKey of the server.
	Certificate, PrivateKey string
	// ClientCA verifies client certificates; "": none is asked for.
	ClientCA string
}

// Certificates is a TLS configuration that follows its files: each handshake uses what they hold at that time. While they
// can't be used (a certificate and a key that do not match yet, because one of them is still being replaced), it is what
// they held before.
type Certificates struct {
	files  TLSFiles
	log    *slog.Logger
	loaded atomic.Pointer[loaded]
	warn   rate.Sometimes
}

// loaded is what the files held.
type loaded struct {
	pem    [3][]byte
	config *tls.Config
}

// LoadCertificates reads the files. Later failures to do so are logged.
func LoadCertificates(files TLSFiles, log *slog.Logger) (*Certificates, error) {
	c := &Certificates{files: files, log: log, warn: rate.Sometimes{Interval: logInterval}}
	first, err := files.load(nil)
	if err != nil {
		return nil, err
	}
	c.loaded.Store(first)
	return c, nil
}

// Config gives the configuration for a listener whose protocols these are (ALPN).
func (c *Certificates) Config(protocols ...string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			config := c.current().Clone()
			config.NextProtos = protocols
			return config, nil
		},
	}
}

// current gives the configuration for a handshake. It compares the files' content, some microseconds' work beside the
// handshake's, because times and sizes can stay equal when the content does not.
func (c *Certificates) current() *tls.Config {
	have := c.loaded.Load()
	now, err := c.files.load(have)
	if err != nil {
		c.warn.Do(func() {
			c.log.Warn("TLS files can't be used; the server goes on with what they held before", "err", err)
		})
		return have.config
	}
	if now != have && c.loaded.CompareAndSwap(have, now) {
		c.log.Info("TLS files have changed and are in use", "certificate", c.files.Certificate, "clientCA", c.files.ClientCA)
	}
	return now.config
}

// load reads the files; it gives back have if that is what they hold.
func (f TLSFiles) load(have *loaded) (*loaded, error) {
	now := &loaded{}
	for i, path := range []string{f.Certificate, f.PrivateKey, f.ClientCA} {
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
	certificate, err := tls.X509KeyPair(now.pem[0], now.pem[1])
	if err != nil {
		return nil, fmt.Errorf("TLS certificate %s with key %s: %w", f.Certificate, f.PrivateKey, err)
	}
	now.config = &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{certificate},
		// Agents do not resume TLS sessions, and a CA that is withdrawn counts from the next handshake.
		SessionTicketsDisabled: true,
	}
	if f.ClientCA != "" {
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(now.pem[2]) {
			return nil, fmt.Errorf("TLS client CA %s holds no PEM certificate", f.ClientCA)
		}
		now.config.ClientCAs = pool
		// Those without a certificate may have a token.
		now.config.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return now, nil
}
