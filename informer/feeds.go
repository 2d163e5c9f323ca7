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

// nodeFeed passes on what matters of one Node. It is used by the goroutine of one
// handler.
type nodeFeed struct {
	provider proxier.EventHandler
	name     string
	last     changetracker.Node
	seen     chan struct{} // closed when the Node has been passed on once
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

// deleted keeps what was known last, as the pods of a node outlive its Node object,
// but load balancers should give it nothing new.
func (f *nodeFeed) deleted(log *zap.Logger) func(*v1.Node) {
	return func(node *v1.Node) {
		if node.Name != f.name {
			return
		}
		log.Warn("the Node is deleted; its last state stays in use", zap.String("node", f.name))
		f.last = NodeOf(node)
		f.last.Draining = "the Node object is deleted"
		f.provider.OnNodeChange(f.last)
	}
}

// cidrFeed passes on the ranges of all ServiceCIDRs together. It is used by the
// goroutine of one handler.
type cidrFeed struct {
	provider proxier.EventHandler
	store    cache.Store
	log      *zap.Logger
	last     []netip.Prefix
	bad      map[string]bool // texts that are reported
}

// changed works out the ranges anew: an object that goes may share a range with
// one that stays.
func (f *cidrFeed) changed() {
	var cidrs []netip.Prefix
	bad := map[string]bool{}
	for _, object := range f.store.List() {
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

// report names a range that is none, once.
func (f *cidrFeed) report(object, text string, err error) {
	if !f.bad[text] {
		f.log.Warn("ServiceCIDR with a range that is none", zap.String("object", object), zap.String("cidr", text), zap.Error(err))
	}
}
