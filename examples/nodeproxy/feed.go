package main

import (
	"cmp"
	"maps"
	"slices"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/internal/manifest"
	"github.com/serviceplane/serviceplane/proxier"
)

// feed tells a provider what has changed since it was told last.
type feed struct {
	node     string
	provider proxier.Provider
	log      *zap.Logger
	told     map[key]manifest.Value
}

// bring tells the provider of everything that is new, different or gone. It does
// so in the order of the names; a Node comes first.
func (f *feed) bring(objects map[key]manifest.Value) {
	for _, k := range sorted(objects) {
		before, after := f.told[k], objects[k]
		if before == nil || !equality.Semantic.DeepEqual(before, after) {
			f.tell(before, after)
		}
	}
	for _, k := range sorted(f.told) {
		if objects[k] == nil {
			f.forget(f.told[k])
		}
	}
	f.told = objects
}

func sorted(objects map[key]manifest.Value) []key {
	return slices.SortedFunc(maps.Keys(objects), func(a, b key) int {
		rank := func(k key) int { return slices.Index([]string{"Node", "Service", "EndpointSlice"}, k.kind) }
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
}

func (f *feed) tell(before, after manifest.Value) {
	switch object := after.(type) {
	case *v1.Node:
		if object.Name == f.node {
			f.provider.OnNodeChange(informer.NodeOf(object))
		}
	case *v1.Service:
		if old, ok := before.(*v1.Service); ok {
			f.provider.OnServiceUpdate(old, object)
			return
		}
		f.provider.OnServiceAdd(object)
	case *discovery.EndpointSlice:
		if old, ok := before.(*discovery.EndpointSlice); ok {
			f.provider.OnEndpointSliceUpdate(old, object)
			return
		}
		f.provider.OnEndpointSliceAdd(object)
	}
}

// forget tells the provider what is gone. The node stays as it was last: it is
// still there, as we run on it.
func (f *feed) forget(value manifest.Value) {
	switch object := value.(type) {
	case *v1.Service:
		f.provider.OnServiceDelete(object)
	case *discovery.EndpointSlice:
		f.provider.OnEndpointSliceDelete(object)
	}
}

// synced tells the provider that it has been told everything.
func (f *feed) synced() {
	if f.told[key{kind: "Node", name: f.node}] == nil {
		f.log.Warn("no manifest of this node: its addresses, zone and pod ranges are not known", zap.String("node", f.node))
		f.provider.OnNodeChange(changetracker.Node{Name: f.node}) // nothing else will come
	}
	f.provider.OnServiceSynced()
	f.provider.OnEndpointSlicesSynced()
}
