package wire

import (
	"google.golang.org/protobuf/proto"

	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// named precedes the encoded Subscription in a key, so that no key of a Subscription is empty.
const named = "."

// SubscriptionKey returns a string that is equal for equal Subscriptions. The key of a Subscription
// to everything, and of nil, is empty. An invalid Subscription, which no server can receive, has
// the key of one that names nothing.
func SubscriptionKey(s *pb.Subscription) string {
	if s == nil || s.GetEverything() {
		return ""
	}
	key, err := proto.MarshalOptions{Deterministic: true}.MarshalAppend([]byte(named), s)
	if err != nil {
		return named
	}
	return string(key)
}

// SubscriptionFromKey returns the Subscription with this key. nil means everything.
func SubscriptionFromKey(key string) (*pb.Subscription, error) {
	if key == "" {
		return nil, nil
	}
	s := &pb.Subscription{}
	return s, proto.Unmarshal([]byte(key[len(named):]), s)
}
