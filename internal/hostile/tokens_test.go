// This file makes tokens of an API server that does not exist, good and invented ones, and counts
// the reviews that they cause.
package hostile

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/slicecast/slicecast/internal/auth"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// These identify the tokens of the API server from which the server reads issuer and keys.
const issuer, audience, keyID = "https://kubernetes.example", "slicecast", "key-1"

// tokens checks tokens with the keys of a made-up API server. It counts the reviews, none of which
// succeeds.
func tokens(reviews *atomic.Int64) *auth.TokenOptions {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	return &auth.TokenOptions{
		Audience: audience, Agents: []types.NamespacedName{{Namespace: "slicecast", Name: "agent"}},
		Review: func(context.Context, *authenticationv1.TokenReview) (*authenticationv1.TokenReview, error) {
			reviews.Add(1)
			return nil, errors.New("the test has no API server")
		},
		Access: func(context.Context, *authorizationv1.SubjectAccessReview) (*authorizationv1.SubjectAccessReview, error) {
			return nil, errors.New("no review of a token succeeds before")
		},
		Get: func(_ context.Context, path string) ([]byte, error) {
			if strings.HasPrefix(path, "/.well-known/") {
				return json.Marshal(map[string]any{"issuer": issuer, "jwks_uri": issuer + "/openid/v1/jwks"})
			}
			return json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{
				{Key: key.Public(), KeyID: keyID, Algorithm: string(jose.ES256), Use: "sig"},
			}})
		},
	}
}

// inventedToken returns a token with the claims of an agent's token, signed with a key of the
// attacker's.
var inventedToken = sync.OnceValue(func() string {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	signer := must(jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: keyID}}, nil))
	now := time.Now()
	return must(jwt.Signed(signer).Claims(jwt.Claims{
		Issuer: issuer, Subject: "system:serviceaccount:slicecast:agent", Audience: jwt.Audience{audience},
		Expiry: jwt.NewNumericDate(now.Add(time.Hour)), IssuedAt: jwt.NewNumericDate(now), NotBefore: jwt.NewNumericDate(now),
	}).Claims(map[string]any{"kubernetes.io": map[string]any{
		"namespace": "slicecast", "serviceaccount": map[string]string{"name": "agent", "uid": "1"},
		"pod": map[string]string{"name": "agent-1", "uid": "2"}, "node": map[string]string{"name": "honest-1", "uid": "3"},
	}}).Serialize())
})

// streamWith opens a stream with a token. Reading from the stream returns the result.
func streamWith(ctx context.Context, conn *grpc.ClientConn, token string) pb.DistributionService_StreamClient {
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	stream, err := pb.NewDistributionServiceClient(conn).Stream(ctx)
	if err != nil {
		return failed{err: err}
	}
	return stream
}

// failed is a stream that could not be opened.
type failed struct {
	pb.DistributionService_StreamClient
	err error
}

// Recv implements pb.DistributionService_StreamClient.
func (f failed) Recv() (*pb.StreamResponse, error) { return nil, f.err }
