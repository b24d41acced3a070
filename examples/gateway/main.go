// Command gateway follows one Service and prints its backends whenever they change. It shows the
// part of an ingress gateway that knows the backends.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/slicecast/slicecast/agent/client"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	server := flag.String("server", "", "address of a slicecast-server: host:port, or unix:///path of its socket, which does not use TLS")
	service := flag.String("service", "default/web", "namespace/name of the Service to follow")
	ca := flag.String("ca-file", "", "CA of the server's certificate (PEM)")
	cert := flag.String("cert-file", "", "client certificate (PEM)")
	key := flag.String("key-file", "", "private key of the client certificate (PEM)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	creds := insecure.NewCredentials()
	if !strings.HasPrefix(*server, "unix:") {
		var err error
		if creds, err = mutualTLS(*ca, *cert, *key); err != nil {
			return err
		}
	}
	follow(ctx, *server, *service, creds)
	return nil
}

func follow(ctx context.Context, server, service string, creds credentials.TransportCredentials) {
	namespace, name, _ := strings.Cut(service, "/")
	wanted := client.ServiceKey{Namespace: namespace, Name: name}
	cache := client.NewCache()
	c := client.New(client.Options{
		Servers:     client.Static(server),
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(creds)},
		Cache:       cache,
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = c.Run(ctx) // returns nil when the context ends
	}()
	for {
		select {
		case <-ended:
			return
		case <-cache.Dirty():
		}
		if changes, ok := cache.Take(); ok && slices.Contains(changes.Services, wanted) {
			_, held := cache.Service(wanted)
			fmt.Println(service, "leads to", backends(held))
		}
	}
}

// backends returns the addresses that receive traffic, for each port.
func backends(slices []*client.Slice) []string {
	var out []string
	for _, s := range slices {
		for _, p := range s.Ports {
			for _, e := range s.Endpoints {
				if e.Conditions.Ready {
					out = append(out, net.JoinHostPort(e.Address.String(), strconv.Itoa(int(p.Port))))
				}
			}
		}
	}
	return out
}

func mutualTLS(ca, cert, key string) (credentials.TransportCredentials, error) {
	pem, err := os.ReadFile(ca)
	if err != nil {
		return nil, fmt.Errorf("-ca-file: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, errors.New("-ca-file contains no certificate")
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("-cert-file, -key-file: %w", err)
	}
	return credentials.NewTLS(&tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}), nil
}
