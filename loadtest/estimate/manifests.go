package estimate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/slicecast/slicecast/internal/source"
)

const (
	// maxManifest is the maximum number of bytes read from a file.
	maxManifest = 1 << 30
	// lookAhead is the number of bytes that decide whether a file is JSON or YAML.
	lookAhead = 4096
	// sampleFlips is the number of flips that are encoded. They represent all flips.
	sampleFlips = 2000
)

// manifests holds the objects of a directory that a kube-proxy would receive.
type manifests struct {
	serviceProxyName string

	objects []object
	slices  []*discoveryv1.EndpointSlice
	nodes   int
	// endpoints are the Services of Endpoints objects. inSlices has the Services that have an
	// EndpointSlice, even if nodes do not receive the slice.
	endpoints []string
	inSlices  map[string]bool
	// unreadable describes what could not be read, and why.
	unreadable []string
}

// readManifests reads the *.yaml, *.yml and *.json files of a directory, like the server's file
// source. A file may contain lists and several documents; other kinds are ignored. Parts that
// cannot be read are left out and listed in unreadable.
func readManifests(directory, serviceProxyName string) (*manifests, error) {
	entries, err := os.ReadDir(directory)
	if err != nil {
		return nil, fmt.Errorf("--manifests: %w", err)
	}
	m := &manifests{serviceProxyName: serviceProxyName, inSlices: make(map[string]bool)}
	for _, e := range entries {
		if !slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(e.Name())) {
			continue
		}
		if err := m.file(filepath.Join(directory, e.Name())); err != nil {
			m.unreadable = append(m.unreadable, fmt.Sprintf("%s: %v", e.Name(), err))
		}
	}
	if len(m.objects) == 0 {
		return nil, fmt.Errorf("--manifests: %s has no Service or EndpointSlice that nodes receive: "+
			"write the objects there with kubectl get services,endpointslices,nodes -A -o yaml%s",
			directory, strings.Join(append([]string{""}, m.unreadable...), "\n"))
	}
	return m, nil
}

func (m *manifests) leftOut() (remarks []string) {
	for _, u := range m.unreadable {
		remarks = append(remarks, fmt.Sprintf("A manifest cannot be read and is left out, with all that follows in its file: %s.", u))
	}
	if lacking := slices.DeleteFunc(slices.Clone(m.endpoints), func(name string) bool { return m.inSlices[name] }); len(lacking) > 0 {
		remarks = append(remarks, fmt.Sprintf("%d Endpoints objects whose Services have no EndpointSlice in the files are left out, such as %s: "+
			"nodes receive only the EndpointSlices that a cluster's control plane creates for them.", len(lacking), lacking[0]))
	}
	return remarks
}

func (m *manifests) file(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	d := yaml.NewYAMLOrJSONDecoder(io.LimitReader(f, maxManifest), lookAhead)
	for {
		var raw runtime.RawExtension
		if err := d.Decode(&raw); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if len(raw.Raw) == 0 || string(raw.Raw) == "null" {
			continue
		}
		if err := m.document(raw.Raw); err != nil {
			return err
		}
	}
}

func (m *manifests) document(raw []byte) error {
	decoded, _, err := scheme.Codecs.UniversalDeserializer().Decode(raw, nil, nil)
	if runtime.IsNotRegisteredError(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if list, ok := decoded.(*corev1.List); ok {
		for _, item := range list.Items {
			if err := m.document(item.Raw); err != nil {
				return err
			}
		}
		return nil
	}
	if meta.IsListType(decoded) {
		return meta.EachListItem(decoded, func(o runtime.Object) error { m.take(o); return nil })
	}
	m.take(decoded)
	return nil
}

// take stores an object if an API server would send it for source.SelectServices or
// source.SelectEndpointSlices.
func (m *manifests) take(o runtime.Object) {
	switch o := o.(type) {
	case *corev1.Node:
		m.nodes++
	case *corev1.Service:
		o.Namespace = cmp.Or(o.Namespace, metav1.NamespaceDefault)
		if o.Spec.ClusterIP != corev1.ClusterIPNone && m.isServed(o) {
			m.objects = append(m.objects, o)
		}
	case *corev1.Endpoints:
		if _, headless := o.Labels[corev1.IsHeadlessService]; !headless {
			m.endpoints = append(m.endpoints, cmp.Or(o.Namespace, metav1.NamespaceDefault)+"/"+o.Name)
		}
	case *discoveryv1.EndpointSlice:
		o.Namespace = cmp.Or(o.Namespace, metav1.NamespaceDefault)
		m.inSlices[o.Namespace+"/"+o.Labels[discoveryv1.LabelServiceName]] = true
		if _, headless := o.Labels[corev1.IsHeadlessService]; !headless {
			m.objects = append(m.objects, o)
			m.slices = append(m.slices, o)
		}
	}
}

// isServed reports whether a Service belongs to the proxy with the configured name.
func (m *manifests) isServed(s *corev1.Service) bool {
	name, named := s.Labels[source.LabelServiceProxyName]
	return name == m.serviceProxyName && named == (m.serviceProxyName != "")
}

// flips makes random endpoints flip as the EndpointSlice controller would write it. It encodes a
// sample and scales the counts to a rate per second over a time.
func (m *manifests) flips(ctx context.Context, c *count, perSecond float64, d time.Duration) error {
	total := 0
	for _, s := range m.slices {
		total += len(s.Endpoints)
	}
	c.seconds = d.Seconds()
	wanted := perSecond * d.Seconds()
	if total == 0 || wanted == 0 {
		return nil
	}
	random := rand.New(rand.NewPCG(1, 1)) // a fixed seed, for the same endpoints each time
	// The controller uses the times of pod conditions, which are in seconds.
	at := time.Now().UTC().Truncate(time.Second)
	for range sampleFlips {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := random.IntN(total)
		i := 0
		for ; n >= len(m.slices[i].Endpoints); i++ {
			n -= len(m.slices[i].Endpoints)
		}
		s := m.slices[i]
		conditions := &s.Endpoints[n].Conditions
		ready := conditions.Ready != nil && !*conditions.Ready
		conditions.Ready, conditions.Serving = &ready, &ready
		if s.Annotations == nil {
			s.Annotations = make(map[string]string)
		}
		at = at.Add(time.Second)
		s.Annotations[corev1.EndpointsLastChangeTriggerTime] = at.Format(time.RFC3339Nano)
		if err := c.event(watch.Modified, s); err != nil {
			return err
		}
	}
	f := &c.slices
	scale := func(v int) int { return int(float64(v) * wanted / sampleFlips) }
	f.events, f.today, f.slicecast, f.updates = scale(f.events), scale(f.today), scale(f.slicecast), scale(f.updates)
	return nil
}
