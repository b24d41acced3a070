package verify

import (
	"fmt"

	"github.com/slicecast/slicecast/agent/view"
	"github.com/slicecast/slicecast/internal/model"
)

// Objects are the objects of a cluster. It is a source.Sink.
type Objects struct {
	objects map[model.Key]model.Keyed
}

// Upsert implements source.Sink.
func (o *Objects) Upsert(object model.Keyed, _ uint64) {
	if o.objects == nil {
		o.objects = map[model.Key]model.Keyed{}
	}
	o.objects[object.Key()] = object
}

// Remove implements source.Sink.
func (o *Objects) Remove(key model.Key, _ uint64) { delete(o.objects, key) }

// Replace implements source.Sink.
func (o *Objects) Replace(kind model.Kind, objects []model.Keyed, _ uint64) {
	for key := range o.objects {
		if key.Kind == kind {
			delete(o.objects, key)
		}
	}
	for _, object := range objects {
		o.Upsert(object, 0)
	}
}

// Progress implements source.Sink.
func (o *Objects) Progress(model.Kind, uint64) {}

// Synced implements source.Sink.
func (o *Objects) Synced() {}

// State returns what a node should do for the objects.
func (o *Objects) State(options view.Options) (view.State, error) {
	v, err := o.View(options)
	if err != nil {
		return view.State{}, err
	}
	return v.State(), nil
}

// View returns a view of the objects for a node.
func (o *Objects) View(options view.Options) (*view.View, error) {
	v := view.New(options)
	var node *model.Node
	slices := map[model.ServiceKey][]*model.Slice{}
	for _, object := range o.objects {
		switch object := object.(type) {
		case *model.Node:
			if object.Name == options.NodeName {
				node = object
			}
		case *model.Slice:
			key := model.ServiceKey{Namespace: object.Namespace, Name: object.Service}
			slices[key] = append(slices[key], object)
		}
	}
	if node == nil {
		return nil, fmt.Errorf("the objects do not contain the Node %s: set --node-name to this machine's Node, "+
			"and include it in what is read", options.NodeName)
	}
	v.SetNode(node)
	for _, object := range o.objects {
		if s, ok := object.(*model.Service); ok {
			key := model.ServiceKey{Namespace: s.Namespace, Name: s.Name}
			v.Set(key, s, slices[key])
		}
	}
	v.Update()
	return v, nil
}
