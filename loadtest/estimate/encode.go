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

// What is around each message on a connection. Both sides send messages one by one as they come, so each is in an HTTP/2 DATA
// frame (RFC 9113, section 4.1) and a TLS 1.3 record (RFC 8446, section 5.2: header, content type, tag) of its own, or in as many as
// their size takes.
const (
	http2Header = 9
	tlsRecord   = 5 + 1 + 16
	grpcPrefix  = 5        // compressed flag and length
	watchPrefix = 4        // length of an event
	frameSize   = 16 << 10 // what a frame and a record hold, by default
)

// onConnection is what a message is below TLS.
func onConnection(message int) int {
	frames := (message + frameSize - 1) / frameSize
	return message + frames*(http2Header+tlsRecord)
}

// protobufSerializer is the API server's for objects: it adds their apiVersion and kind, and a magic number.
var protobufSerializer = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)

// encode gives an object as the API server encodes it in protobuf.
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

// eventBytes is what a watch event with an encoded object has on a watcher's connection, in protobuf.
func eventBytes(kind watch.EventType, raw []byte) int {
	event := metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: raw}}
	return onConnection(event.Size() + watchPrefix)
}

// compressed counts what a list has that is compressed as the API server does it with those of more than 128 KiB: gzip, at the
// fastest level.
type compressed struct {
	gzip  *gzip.Writer
	bytes int
}

func newCompressed() *compressed {
	c := &compressed{}
	c.gzip, _ = gzip.NewWriterLevel(c, gzip.BestSpeed) // which is a level
	return c
}

// Write implements io.Writer, behind the compression.
func (c *compressed) Write(b []byte) (int, error) {
	c.bytes += len(b)
	return len(b), nil
}

// bookmarkBytes is what a watcher gets when there is nothing else, about once a minute on each of its two watches.
func bookmarkBytes() (services, slices int, err error) {
	meta := metav1.ObjectMeta{ResourceVersion: "123456789"} // of a cluster that has been there for a while
	service, err := encode(&corev1.Service{ObjectMeta: meta})
	if err != nil {
		return 0, 0, err
	}
	slice, err := encode(&discoveryv1.EndpointSlice{ObjectMeta: meta})
	return eventBytes(watch.Bookmark, service), eventBytes(watch.Bookmark, slice), err
}

// updateBytes is what an Update has on a node's connection.
func updateBytes(u *model.Update) (int, error) {
	frames, err := wire.EncodeParts(u)
	if err != nil {
		return 0, err
	}
	return messagesBytes(frames), nil
}

// messagesBytes is what frames have on a node's connection.
func messagesBytes(frames []wire.Frame) (out int) {
	for _, f := range frames {
		out += onConnection(len(f) + grpcPrefix)
	}
	return out
}

// coldBytes is what a node that holds nothing gets of all shards: compressed, as it is sent then.
func coldBytes(s *store.Store) (out int, err error) {
	for shard := range s.Shards() {
		snapshot := s.Snapshot(shard)
		if snapshot.Len() == 0 {
			continue
		}
		frames, err := wire.EncodeParts(snapshot.Since(0))
		if err != nil {
			return 0, err
		}
		if frames, err = wire.CompressParts(frames); err != nil {
			return 0, err
		}
		out += messagesBytes(frames)
	}
	return out, nil
}

// heartbeatBytes is what each node gets in each interval: the digest of the state.
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
