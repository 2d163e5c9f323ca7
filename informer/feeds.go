package informer

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// nodeFeed passes the relevant changes of one Node on. Only the goroutine of one handler
// uses it.
type nodeFeed struct {
	provider proxier.EventHandler
	name     string
	log      *zap.Logger
	last     changetracker.Node
	kept     []string      // of last, what the object lacks
	seen     chan struct{} // closed after the first OnNodeChange
	once     sync.Once
}

func (f *nodeFeed) changed(node *v1.Node) {
	if node.Name != f.name {
		return
	}
	n := NodeOf(node)
	f.keep(&n)
	if !reflect.DeepEqual(n, f.last) {
		f.last = n
		f.provider.OnNodeChange(n)
	}
	f.once.Do(func() { close(f.seen) })
}

// keep gives the node what the object lacks and the last one had: a Node that is created again has neither
// addresses nor pod CIDRs until its kubelet and the controllers have written them.
func (f *nodeFeed) keep(n *changetracker.Node) {
	var kept []string
	if len(n.Addresses) == 0 && len(f.last.Addresses) > 0 {
		n.Addresses = f.last.Addresses
		kept = append(kept, "status.addresses")
	}
	if len(n.PodCIDRs) == 0 && len(f.last.PodCIDRs) > 0 {
		n.PodCIDRs = f.last.PodCIDRs
		kept = append(kept, "spec.podCIDRs")
	}
	if len(kept) > 0 && !slices.Equal(kept, f.kept) {
		f.log.Warn("the Node lacks what it had: the last values stay in use", zap.String("node", f.name), zap.Strings("missing", kept))
	}
	f.kept = kept
}

// deleted keeps the last state, since the pods of a node outlive its Node object, and
// marks it as draining, so that load balancers send no new connections.
func (f *nodeFeed) deleted(node *v1.Node) {
	if node.Name != f.name {
		return
	}
	f.log.Warn("Node was deleted: its last state stays in use", zap.String("node", f.name))
	f.last.Draining = "the Node object is deleted"
	f.provider.OnNodeChange(f.last)
}

// cidrFeed passes the ranges of all ServiceCIDRs on. Only the goroutine of one handler
// uses it.
type cidrFeed struct {
	provider proxier.EventHandler
	log      *zap.Logger
	objects  map[string][]netip.Prefix // by name: a deleted object may share a range with another one
	last     []netip.Prefix
	bad      map[string]string // by name of the object, the errors that were logged
}

func newCIDRFeed(p proxier.EventHandler, log *zap.Logger) *cidrFeed {
	return &cidrFeed{provider: p, log: log, objects: map[string][]netip.Prefix{}, bad: map[string]string{}}
}

func (f *cidrFeed) changed(s *networking.ServiceCIDR) {
	var cidrs []netip.Prefix
	var errs []error
	for _, text := range s.Spec.CIDRs {
		cidr, ok := changetracker.ParsePrefix(text)
		if !ok {
			errs = append(errs, fmt.Errorf("%q is no range", text))
			continue
		}
		cidrs = append(cidrs, cidr)
	}
	f.report(s.Name, errors.Join(errs...))
	f.objects[s.Name] = cidrs
	f.deliver()
}

func (f *cidrFeed) deleted(s *networking.ServiceCIDR) {
	delete(f.objects, s.Name)
	delete(f.bad, s.Name)
	f.deliver()
}

func (f *cidrFeed) deliver() {
	cidrs := slices.SortedFunc(slices.Values(slices.Concat(slices.Collect(maps.Values(f.objects))...)), netip.Prefix.Compare)
	if cidrs = slices.Compact(cidrs); !slices.Equal(cidrs, f.last) {
		f.last = cidrs
		f.provider.OnServiceCIDRsChanged(cidrs)
	}
}

// report logs the invalid ranges of an object, once.
func (f *cidrFeed) report(object string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != f.bad[object] {
		f.log.Warn("invalid ranges of a ServiceCIDR are ignored", zap.String("object", object), zap.Error(err))
	}
	f.bad[object] = text
}
