package estimate

import (
	"compress/gzip"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/internal/store"
	"github.com/slicecast/slicecast/internal/wire"
	pb "github.com/slicecast/slicecast/proto/slicecast/v1"
)

// Overhead of a message on a connection, in bytes. Both sides send messages one by one as they
// arise. Each message is therefore in HTTP/2 DATA frames (RFC 9113, section 4.1) and TLS 1.3
// records of its own (RFC 8446, section 5.2: header, content type and tag): one of each, or as many
// as its size requires.
const (
	http2Header = 9
	tlsRecord   = 5 + 1 + 16
	grpcPrefix  = 5        // flag for compression, and length
	watchPrefix = 4        // length of the event
	frameSize   = 16 << 10 // default maximum of the payload of a frame and of a record
)

// onConnection returns the size of a message below TLS, in bytes.
func onConnection(message int) int {
	frames := (message + frameSize - 1) / frameSize
	return message + frames*(http2Header+tlsRecord)
}

// protobufSerializer serializes objects as the API server does, with apiVersion, kind and a magic
// number.
var protobufSerializer = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)

// encode encodes an object in protobuf as the API server does.
func encode(o runtime.Object) ([]byte, error) {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		return nil, fmt.Errorf("encode as the API server does: %w", err)
	}
	o = o.DeepCopyObject()
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	raw, err := runtime.Encode(protobufSerializer, o)
	if err != nil {
		return nil, fmt.Errorf("encode as the API server does: %w", err)
	}
	return raw, nil
}

// eventBytes returns the size of a watch event with an encoded object on a watcher's connection.
func eventBytes(kind watch.EventType, raw []byte) int {
	event := metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: raw}}
	return onConnection(event.Size() + watchPrefix)
}

// compressed counts the bytes of a list after gzip at the fastest level. The API server compresses
// lists of more than 128 KiB in this way.
type compressed struct {
	gzip  *gzip.Writer
	bytes int
}

func newCompressed() *compressed {
	c := &compressed{}
	c.gzip, _ = gzip.NewWriterLevel(c, gzip.BestSpeed) // cannot fail: the level is valid
	return c
}

// Write implements io.Writer for compressed bytes.
func (c *compressed) Write(b []byte) (int, error) {
	c.bytes += len(b)
	return len(b), nil
}

// bookmarkBytes returns the sizes of the bookmarks that a watcher receives on its two watches,
// about once a minute if there are no events.
func bookmarkBytes() (services, slices int, err error) {
	// The version has the length of versions in an older cluster.
	meta := metav1.ObjectMeta{ResourceVersion: "123456789"}
	service, err := encode(&corev1.Service{ObjectMeta: meta})
	if err != nil {
		return 0, 0, err
	}
	slice, err := encode(&discoveryv1.EndpointSlice{ObjectMeta: meta})
	return eventBytes(watch.Bookmark, service), eventBytes(watch.Bookmark, slice), err
}

// updateBytes returns the size of an Update on a node's connection.
func updateBytes(u *model.Update) (int, error) {
	frames, err := wire.EncodeParts(u)
	if err != nil {
		return 0, err
	}
	return messagesBytes(frames), nil
}

func messagesBytes(frames []wire.Frame) (out int) {
	for _, f := range frames {
		out += onConnection(len(f) + grpcPrefix)
	}
	return out
}

// coldBytes returns the size of all shards on the connection of a node that holds nothing. The
// server compresses them in this case.
func coldBytes(s *store.Store) (out int, err error) {
	err = encodeShards(s, func(frames []wire.Frame) error {
		compressed, err := wire.CompressParts(frames)
		out += messagesBytes(compressed)
		return err
	})
	return out, err
}

// encodeShards calls do with the encoded content of each shard that is not empty.
func encodeShards(s *store.Store, do func([]wire.Frame) error) error {
	for shard := range s.Shards() {
		if snapshot := s.Snapshot(shard); snapshot.Len() > 0 {
			frames, err := wire.EncodeParts(snapshot.Since(0))
			if err != nil {
				return err
			}
			if err := do(frames); err != nil {
				return err
			}
		}
	}
	return nil
}

// heartbeatBytes returns the size of the heartbeat that each node receives in each interval.
func heartbeatBytes(s *store.Store) (int, error) {
	digest, sequences := s.Digest()
	m := &pb.Heartbeat{Digest: digest[:]}
	for _, sequence := range sequences {
		m.SequenceSum += sequence
	}
	f, err := wire.Encode(&pb.StreamResponse{Message: &pb.StreamResponse_Heartbeat{Heartbeat: m}})
	if err != nil {
		return 0, err
	}
	return onConnection(len(f) + grpcPrefix), nil
}
