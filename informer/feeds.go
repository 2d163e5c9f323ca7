package informer

import (
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// nodeFeed passes the relevant changes of one Node on. Only the goroutine of one handler
// uses it.
type nodeFeed struct {
	provider proxier.EventHandler
	name     string
	last     changetracker.Node
	seen     chan struct{} // closed after the first OnNodeChange
	once     sync.Once
}

func (f *nodeFeed) changed(node *v1.Node) {
	if node.Name != f.name {
		return
	}
	if n := NodeOf(node); !reflect.DeepEqual(n, f.last) {
		f.last = n
		f.provider.OnNodeChange(n)
	}
	f.once.Do(func() { close(f.seen) })
}

// deleted keeps the last state, since the pods of a node outlive its Node object, and
// marks it as draining, so that load balancers send no new connections.
func (f *nodeFeed) deleted(log *zap.Logger) func(*v1.Node) {
	return func(node *v1.Node) {
		if node.Name != f.name {
			return
		}
		log.Warn("Node was deleted: its last state stays in use", zap.String("node", f.name))
		f.last = NodeOf(node)
		f.last.Draining = "the Node object is deleted"
		f.provider.OnNodeChange(f.last)
	}
}

// cidrFeed passes the ranges of all ServiceCIDRs on. Only the goroutine of one handler
// uses it.
type cidrFeed struct {
	provider proxier.EventHandler
	list     cache.SharedIndexInformer
	log      *zap.Logger
	last     []netip.Prefix
	bad      map[string]bool // invalid ranges, which are logged once
}

// changed collects all ranges again: a deleted object may share a range with another
// one.
func (f *cidrFeed) changed() {
	var cidrs []netip.Prefix
	bad := map[string]bool{}
	for _, object := range f.list.GetStore().List() {
		s, ok := object.(*networking.ServiceCIDR)
		if !ok {
			continue
		}
		for _, text := range s.Spec.CIDRs {
			cidr, err := netip.ParsePrefix(text)
			if err != nil {
				bad[text] = true
				f.report(s.Name, text, err)
				continue
			}
			cidrs = append(cidrs, cidr.Masked())
		}
	}
	f.bad = bad
	slices.SortFunc(cidrs, netip.Prefix.Compare)
	cidrs = slices.Compact(cidrs)
	if !slices.Equal(cidrs, f.last) {
		f.last = cidrs
		f.provider.OnServiceCIDRsChanged(cidrs)
	}
}

// report logs an invalid range once.
func (f *cidrFeed) report(object, text string, err error) {
	if !f.bad[text] {
		f.log.Warn("ignore invalid range of ServiceCIDR", zap.String("object", object), zap.String("cidr", text), zap.Error(err))
	}
}
