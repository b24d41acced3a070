package estimate

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/slicecast/slicecast/internal/source"
	"github.com/slicecast/slicecast/internal/store"
)

// object is a Service or an EndpointSlice of the Kubernetes API.
type object interface {
	runtime.Object
	metav1.Object
}

// count follows the objects of a cluster, and adds up the bytes that each side sends to a node.
type count struct {
	converter *source.Converter
	store     *store.Store
	// objects has the numbers of objects that nodes hold at the end.
	objects struct{ services, slices, endpoints int }
	// cold is the size of the initial state as events to a kube-proxy, in bytes. lists is its size
	// as lists.
	cold  int
	lists *compressed
	// raw are the initial objects, encoded. memory is the heap that they take on a node, in bytes.
	raw              [][]byte
	memory           struct{ today, slicecast int }
	services, slices flow
	// seconds is the time that the flows took.
	seconds float64
}

type flow struct {
	events           int
	today, slicecast int // bytes
	updates          int
}

func newCount(serviceProxyName string) (*count, error) {
	s, err := store.New(store.Options{})
	if err != nil {
		return nil, err
	}
	return &count{converter: source.NewConverter(serviceProxyName), store: s, lists: newCompressed()}, nil
}

func (c *count) begin(o object) error {
	raw, err := encode(o)
	if err != nil {
		return err
	}
	c.raw = append(c.raw, raw)
	c.cold += eventBytes(watch.Added, raw)
	if _, err := c.lists.gzip.Write(raw); err != nil {
		return err
	}
	if _, converted, _ := c.converter.Convert(o); converted != nil {
		c.store.Upsert(converted, source.ResourceVersion(o))
	}
	return nil
}

func (c *count) begun() (err error) {
	c.store.Synced()
	c.store.Publish()
	if c.memory.today, err = heapOf(func() ([]any, error) { return decodeToday(c.raw) }); err != nil {
		return err
	}
	if c.memory.slicecast, err = heapOf(func() ([]any, error) { return decodeSlicecast(c.store) }); err != nil {
		return err
	}
	c.raw = nil
	return c.lists.gzip.Close()
}

func (c *count) event(kind watch.EventType, o object) error {
	f := &c.slices
	if _, ok := o.(*corev1.Service); ok {
		f = &c.services
	}
	raw, err := encode(o)
	if err != nil {
		return err
	}
	f.events++
	f.today += eventBytes(kind, raw)
	key, converted, _ := c.converter.Convert(o)
	if kind == watch.Deleted || converted == nil {
		c.store.Remove(key, source.ResourceVersion(o))
	} else {
		c.store.Upsert(converted, source.ResourceVersion(o))
	}
	for _, u := range c.store.Publish().Updates {
		n, err := updateBytes(u)
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
		f.updates++
		f.slicecast += n
	}
	return nil
}

func (c *count) end() {
	for shard := range c.store.Shards() {
		u := c.store.Snapshot(shard).Since(0)
		c.objects.services += len(u.Services)
		c.objects.slices += len(u.Slices)
		for _, s := range u.Slices {
			c.objects.endpoints += len(s.Endpoints)
		}
	}
}
