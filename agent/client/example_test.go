// This example shows how other programs use the package.
package client_test

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/slicecast/slicecast/agent/client"
)

// Example shows an ingress gateway that follows the Services of a namespace.
func Example() {
	cache := client.NewCache()
	c := client.New(client.Options{
		Servers:     client.Static("slicecast.example:8472"),
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(nil))},
		Cache:       cache,
	})
	ctx := context.Background()
	go func() { _ = c.Run(ctx) }() // runs until the context ends

	for range cache.Dirty() {
		changes, _ := cache.Take()
		for _, key := range changes.Services {
			if key.Namespace != "shop" {
				continue
			}
			service, slices := cache.Service(key)
			fmt.Println(key, service != nil, len(slices))
		}
	}
}
