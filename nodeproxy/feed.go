package nodeproxy

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

// feed calls a provider with the differences between sets of objects.
type feed struct {
	node     string
	provider proxier.Provider
	log      *zap.Logger
	current  map[key]manifest.Value // what the provider has
}

// update passes objects that are new, changed or deleted to the provider. The Node comes
// first, the others in the order of their names.
func (f *feed) update(objects map[key]manifest.Value) {
	for _, k := range sorted(objects) {
		before, after := f.current[k], objects[k]
		if before == nil || !equality.Semantic.DeepEqual(before, after) {
			f.put(before, after)
		}
	}
	for _, k := range sorted(f.current) {
		if objects[k] == nil {
			f.remove(f.current[k])
		}
	}
	f.current = objects
}

func sorted(objects map[key]manifest.Value) []key {
	return slices.SortedFunc(maps.Keys(objects), func(a, b key) int {
		rank := func(k key) int { return slices.Index([]string{"Node", "Service", "EndpointSlice"}, k.kind) }
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
}

func (f *feed) put(before, after manifest.Value) {
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

// remove deletes an object. The node stays as it was: it exists, because the proxy runs
// on it.
func (f *feed) remove(value manifest.Value) {
	switch object := value.(type) {
	case *v1.Service:
		f.provider.OnServiceDelete(object)
	case *discovery.EndpointSlice:
		f.provider.OnEndpointSliceDelete(object)
	}
}

// synced reports to the provider that it has all objects.
func (f *feed) synced() {
	if f.current[key{kind: "Node", name: f.node}] == nil {
		f.log.Warn("no manifest has this Node: the proxy works without its addresses, zone and pod CIDRs", zap.String("node", f.node))
		f.provider.OnNodeChange(changetracker.Node{Name: f.node}) // the provider waits for it
	}
	f.provider.OnServiceSynced()
	f.provider.OnEndpointSlicesSynced()
}
