package app

import (
	"crypto/tls"
	"fmt"
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client"
	"github.com/slicecast/slicecast/internal/tlsfiles"
	"github.com/slicecast/slicecast/internal/wire"
)

// dialOptions returns the options for connections to servers, which contain the credentials.
func (o *Options) dialOptions(logger *slog.Logger) ([]grpc.DialOption, error) {
	if o.InsecurePlaintext {
		return []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, nil
	}
	files, err := tlsfiles.Follow(tlsfiles.Files{Certificate: o.ClientCertFile, PrivateKey: o.ClientKeyFile, CA: o.CAFile}, logger)
	if err != nil {
		return nil, fmt.Errorf("--ca-file, --client-cert-file, --client-key-file: %w", err)
	}
	// Each client.Server has the name that its certificate is checked against.
	out := []grpc.DialOption{grpc.WithTransportCredentials(files.ClientCredentials(wire.Protocol))}
	if o.TokenFile != "" {
		out = append(out, grpc.WithPerRPCCredentials(client.TokenFile(o.TokenFile)))
	}
	return out, nil
}

// metricsTLS returns the TLS settings of /metrics, which require a client certificate.
func (o *Options) metricsTLS(logger *slog.Logger) (*tls.Config, error) {
	files, err := tlsfiles.Follow(tlsfiles.Files{
		Certificate: o.MetricsCertFile, PrivateKey: o.MetricsKeyFile, CA: o.MetricsClientCAFile,
	}, logger)
	if err != nil {
		return nil, fmt.Errorf("--metrics-cert-file, --metrics-key-file, --metrics-client-ca-file: %w", err)
	}
	return files.Server(tls.RequireAndVerifyClientCert, "http/1.1"), nil
}
