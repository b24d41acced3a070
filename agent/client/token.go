package client

import (
	"context"
	"fmt"
	"os"
	"strings"
)

// TokenFile is the path of a file with a bearer token. It is read for each stream, because the
// kubelet renews projected tokens.
type TokenFile string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (f TokenFile) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	b, err := os.ReadFile(string(f))
	if err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if token == "" {
		return nil, fmt.Errorf("read the token: %s is empty", string(f))
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (f TokenFile) RequireTransportSecurity() bool { return true }
