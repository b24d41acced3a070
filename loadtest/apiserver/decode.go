package apiserver

import (
	"fmt"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/slicecast/slicecast/internal/model"
	"github.com/slicecast/slicecast/loadtest/memo"
)

// maxEvents and maxLists bound the total size, in bytes, of the events and lists whose decoded
// forms are kept. The decoded forms are much smaller.
const (
	maxEvents = 256 << 20
	maxLists  = 1 << 30
)

// event is the part of a watch event that watchers need.
type event struct {
	key model.Key
	// number is the number of the object among those of its kind.
	number int
	// version is a hash of key and resourceVersion. It is 0 if the object was removed.
	version   uint64
	triggerMS int64
	// resourceVersion is the version from which a watch may continue.
	resourceVersion string
	// bookmark means that there is no object. complete means that the bookmark ends a streamed
	// list.
	bookmark, complete bool
}

type list struct {
	events          []*event
	resourceVersion string
}

// decoder decodes what the API server sends. Equal bytes are decoded once for all watchers.
type decoder struct {
	stream, object runtime.Decoder
	events         *memo.Memo[memo.Bytes, *event]
	lists          *memo.Memo[memo.Bytes, *list]

	mu      sync.Mutex // guards the fields below
	numbers map[model.Key]int
	count   map[model.Kind]int // next number
	sizes   map[int]int        // number of endpoints in the latest version of each slice, by number
}

func newDecoder() *decoder {
	// Protobuf is always registered.
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	return &decoder{
		stream: info.StreamSerializer.Serializer, object: info.Serializer,
		events: memo.New[memo.Bytes, *event](maxEvents), lists: memo.New[memo.Bytes, *list](maxLists),
		numbers: make(map[model.Key]int), count: make(map[model.Kind]int), sizes: make(map[int]int),
	}
}

func (d *decoder) endpoints(numbers []int) (sum int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, number := range numbers {
		sum += d.sizes[number]
	}
	return sum
}

// event decodes an event of a watch. It does not retain the frame. If the event reports an error,
// event returns that error.
func (d *decoder) event(frame []byte) (*event, error) {
	return d.events.Get(memo.KeyOf(frame), max(1, len(frame)), func() (*event, error) {
		var envelope metav1.WatchEvent
		if _, _, err := d.stream.Decode(frame, nil, &envelope); err != nil {
			return nil, fmt.Errorf("decode a watch event: %w", err)
		}
		o, _, err := d.object.Decode(envelope.Object.Raw, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("decode the object of a watch event: %w", err)
		}
		kind := watch.EventType(envelope.Type)
		if kind == watch.Error {
			return nil, apierrors.FromObject(o)
		}
		e, err := d.of(o)
		if err != nil {
			return nil, err
		}
		switch kind {
		case watch.Deleted:
			e.version = 0
		case watch.Bookmark:
			accessor, err := meta.Accessor(o)
			if err != nil {
				return nil, err
			}
			e = &event{bookmark: true, resourceVersion: e.resourceVersion, complete: accessor.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"}
		}
		return e, nil
	})
}

func (d *decoder) list(content []byte) (*list, error) {
	return d.lists.Get(memo.KeyOf(content), max(1, len(content)), func() (*list, error) {
		o, _, err := d.object.Decode(content, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("decode a list: %w", err)
		}
		accessor, err := meta.ListAccessor(o)
		if err != nil {
			return nil, err
		}
		out := &list{resourceVersion: accessor.GetResourceVersion()}
		err = meta.EachListItem(o, func(o runtime.Object) error {
			e, err := d.of(o)
			out.events = append(out.events, e)
			return err
		})
		return out, err
	})
}

func (d *decoder) of(o runtime.Object) (*event, error) {
	accessor, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	e := &event{
		key:             model.Key{Namespace: accessor.GetNamespace(), Name: accessor.GetName()},
		resourceVersion: accessor.GetResourceVersion(),
	}
	size := 0
	switch o := o.(type) {
	case *corev1.Service:
		e.key.Kind = model.KindService
	case *discoveryv1.EndpointSlice:
		e.key.Kind, size = model.KindSlice, len(o.Endpoints)
		if at, err := time.Parse(time.RFC3339Nano, accessor.GetAnnotations()[corev1.EndpointsLastChangeTriggerTime]); err == nil {
			e.triggerMS = at.UnixMilli()
		}
	case *corev1.Node:
		e.key.Kind = model.KindNode
	default:
		return nil, fmt.Errorf("the API server sent an unexpected %T", o)
	}
	e.version = versionOf(e.key, e.resourceVersion)
	d.mu.Lock()
	defer d.mu.Unlock()
	number, ok := d.numbers[e.key]
	if !ok {
		number = d.count[e.key.Kind]
		d.numbers[e.key] = number
		d.count[e.key.Kind]++
	}
	if e.number = number; e.key.Kind == model.KindSlice {
		d.sizes[number] = size
	}
	return e, nil
}

// versionOf returns the version of an object. The result is 0 only with a probability of 2^-64.
func versionOf(key model.Key, resourceVersion string) uint64 {
	return xxhash.Sum64String(key.String() + "\x00" + resourceVersion)
}
