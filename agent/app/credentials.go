package app

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/internal/wire"
)

// dialOptions gives the credentials for the server.
func (o *Options) dialOptions() ([]grpc.DialOption, error) {
	if o.InsecurePlaintext {
		return []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, nil
	}
	roots, err := certPool(o.CAFile)
	if err != nil {
		return nil, fmt.Errorf("--ca-file: %w", err)
	}
	// The name to expect comes with each server; see client.Server.
	config := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13, NextProtos: []string{wire.ALPN, "h2"}}
	if o.ClientCertFile != "" {
		load := func() (*tls.Certificate, error) { return keyPair(o.ClientCertFile, o.ClientKeyFile) }
		if _, err := load(); err != nil {
			return nil, fmt.Errorf("--client-cert-file: %w", err)
		}
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	out := []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(config))}
	if o.TokenFile != "" {
		out = append(out, grpc.WithPerRPCCredentials(tokenFile(o.TokenFile)))
	}
	return out, nil
}

// metricsTLS gives the TLS settings of /metrics: certificates are read for each connection, clients must have one.
func (o *Options) metricsTLS() (*tls.Config, error) {
	clients, err := certPool(o.MetricsClientCAFile)
	if err != nil {
		return nil, fmt.Errorf("--metrics-client-ca-file: %w", err)
	}
	load := func() (*tls.Certificate, error) { return keyPair(o.MetricsCertFile, o.MetricsKeyFile) }
	if _, err := load(); err != nil {
		return nil, fmt.Errorf("--metrics-cert-file: %w", err)
	}
	return &tls.Config{
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients, MinVersion: tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return load() },
	}, nil
}

func certPool(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate in PEM form", file)
	}
	return pool, nil
}

func keyPair(certFile, keyFile string) (*tls.Certificate, error) {
	c, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, err
	}
	return &c, nil
}

// tokenFile is a file with a bearer token, as the kubelet projects and renews it.
type tokenFile string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (f tokenFile) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	b, err := os.ReadFile(string(f))
	if err != nil {
		return nil, fmt.Errorf("--token-file: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if token == "" {
		return nil, errors.New("--token-file: " + string(f) + " is empty")
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (f tokenFile) RequireTransportSecurity() bool { return true }
