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

// maxEvents and maxLists bound the bytes whose decoded form is kept. What it holds is much smaller.
const (
	maxEvents = 256 << 20
	maxLists  = 1 << 30
)

// event is what is needed of one of a watch.
type event struct {
	key model.Key
	// number of the object among those of its kind.
	number int
	// version follows from key and resourceVersion; 0: the object is gone.
	version   uint64
	triggerMS int64
	// resourceVersion that a watch goes on from.
	resourceVersion string
	// bookmark: there is no object. The one that completes the list of a streaming one says so.
	bookmark, complete bool
}

type list struct {
	events          []*event
	resourceVersion string
}

// decoder decodes what the API server sends, each thing once for all who get the very same bytes.
type decoder struct {
	stream, object runtime.Decoder
	events         *memo.Memo[frameKey, *event]
	lists          *memo.Memo[frameKey, *list]

	mu      sync.Mutex // guards what follows
	numbers map[model.Kind]map[model.Key]int
	sizes   map[int]int // endpoints of slices, by number, as decoded last
}

type frameKey struct {
	length int
	hash   uint64
}

func newDecoder() *decoder {
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf) // it is there
	return &decoder{
		stream: info.StreamSerializer.Serializer, object: info.Serializer,
		events: memo.New[frameKey, *event](maxEvents), lists: memo.New[frameKey, *list](maxLists),
		numbers: make(map[model.Kind]map[model.Key]int), sizes: make(map[int]int),
	}
}

// size is how many endpoints a slice has.
func (d *decoder) size(number int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sizes[number]
}

// event decodes an event of a watch. The memory of the frame stays the caller's. One that tells of an error is one.
func (d *decoder) event(frame []byte) (*event, error) {
	return d.events.Get(frameKey{len(frame), xxhash.Sum64(frame)}, max(1, len(frame)), func() (*event, error) {
		var envelope metav1.WatchEvent
		if _, _, err := d.stream.Decode(frame, nil, &envelope); err != nil {
			return nil, fmt.Errorf("event of a watch: %w", err)
		}
		o, _, err := d.object.Decode(envelope.Object.Raw, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("object of a watch: %w", err)
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

// list decodes a list.
func (d *decoder) list(content []byte) (*list, error) {
	return d.lists.Get(frameKey{len(content), xxhash.Sum64(content)}, max(1, len(content)), func() (*list, error) {
		o, _, err := d.object.Decode(content, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("list: %w", err)
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
		return nil, fmt.Errorf("the API server sends a %T where nobody asked for one", o)
	}
	e.version = versionOf(e.key, e.resourceVersion)
	d.mu.Lock()
	defer d.mu.Unlock()
	numbers := d.numbers[e.key.Kind]
	if numbers == nil {
		numbers = make(map[model.Key]int)
		d.numbers[e.key.Kind] = numbers
	}
	number, ok := numbers[e.key]
	if !ok {
		number = len(numbers)
		numbers[e.key] = number
	}
	if e.number = number; e.key.Kind == model.KindSlice {
		d.sizes[number] = size
	}
	return e, nil
}

// versionOf is never 0 for what is there, but by a chance of 2^-64.
func versionOf(key model.Key, resourceVersion string) uint64 {
	return xxhash.Sum64String(key.String() + "\x00" + resourceVersion)
}
