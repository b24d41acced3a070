package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
)

// dialOptions gives the credentials for the server.
func (o *Options) dialOptions(logger *slog.Logger) ([]grpc.DialOption, error) {
	if o.InsecurePlaintext {
		return []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, nil
	}
	files, err := tlsfiles.Follow(tlsfiles.Files{Certificate: o.ClientCertFile, PrivateKey: o.ClientKeyFile, CA: o.CAFile}, logger)
	if err != nil {
		return nil, fmt.Errorf("--ca-file, --client-cert-file, --client-key-file: %w", err)
	}
	// The name to expect comes with each server; see client.Server.
	out := []grpc.DialOption{grpc.WithTransportCredentials(files.ClientCredentials(wire.Protocol))}
	if o.TokenFile != "" {
		out = append(out, grpc.WithPerRPCCredentials(tokenFile(o.TokenFile)))
	}
	return out, nil
}

// metricsTLS gives the TLS settings of /metrics: clients must have a certificate.
func (o *Options) metricsTLS(logger *slog.Logger) (*tls.Config, error) {
	files, err := tlsfiles.Follow(tlsfiles.Files{
		Certificate: o.MetricsCertFile, PrivateKey: o.MetricsKeyFile, CA: o.MetricsClientCAFile,
	}, logger)
	if err != nil {
		return nil, fmt.Errorf("--metrics-cert-file, --metrics-key-file, --metrics-client-ca-file: %w", err)
	}
	return files.Server(tls.RequireAndVerifyClientCert, "http/1.1"), nil
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
