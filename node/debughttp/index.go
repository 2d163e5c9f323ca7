package debughttp

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// indexLifetime is how long the index is kept without a request, since it needs memory for each
// Service.
const indexLifetime = 5 * time.Minute

// index has what the list needs of each Service. The first request makes it, and later ones
// bring it up to date, which costs what has changed since.
type index struct {
	mu      sync.Mutex // guards all below
	indexed resolved
	sorted  []*listedService
	forget  *time.Timer
}

// resolved is what is programmed in each IP family; nil before the first successful sync.
type resolved [2]*desired.Resolved

// resolved reads both families. If a sync happens in between, the next request corrects that.
func (h *handler) resolved() resolved {
	return resolved{h.source.Resolved(v1.IPv4Protocol), h.source.Resolved(v1.IPv6Protocol)}
}

// servicePorts yields the names of the service ports of a Service, by family.
func (p *resolved) servicePorts(name types.NamespacedName, yield func(*desired.Resolved, changetracker.ServicePortName)) {
	for _, family := range p {
		if state := family.State(); state != nil {
			for _, port := range state.ServicePorts(name) {
				yield(family, port)
			}
		}
	}
}

// listedService is a Service in the index. It never changes.
type listedService struct {
	name types.NamespacedName
	// text is what a search looks at: namespace/name, name, the VIPs, the node ports and the
	// addresses of the endpoints, each between line feeds.
	text    string
	verdict verdict
	filters filters
}

// services returns all Services, sorted by name. The caller must not change the list.
func (x *index) services(now resolved) []*listedService {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.forget == nil {
		x.forget = time.AfterFunc(indexLifetime, x.clear)
	}
	x.forget.Reset(indexLifetime)
	changed, all := now.changed(&x.indexed)
	x.indexed = now
	if all {
		x.sorted = now.everything()
	} else if len(changed) > 0 {
		x.update(changed)
	}
	return x.sorted
}

func (x *index) clear() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.indexed, x.sorted = resolved{}, nil
}

// changed returns the names of the Services that may differ, perhaps some of them twice. all means
// that any may.
func (p *resolved) changed(since *resolved) (names []types.NamespacedName, all bool) {
	for i, family := range p {
		some, every := family.Changed(since[i])
		names, all = append(names, some...), all || every
	}
	return names, all
}

// everything returns all Services, sorted by name.
func (p *resolved) everything() []*listedService {
	drafts := map[types.NamespacedName]*draft{}
	for _, family := range p {
		for s := range family.All() {
			d, ok := drafts[s.Name.NamespacedName]
			if !ok {
				d = newDraft(s.Name.NamespacedName)
				drafts[s.Name.NamespacedName] = d
			}
			d.add(family, s)
		}
	}
	all := make([]*listedService, 0, len(drafts))
	for _, d := range drafts {
		all = append(all, d.finish())
	}
	sortByName(all)
	return all
}

func sortByName(list []*listedService) {
	slices.SortFunc(list, func(a, b *listedService) int { return compareNames(a.name, b.name) })
}

// update replaces Services in the index.
func (x *index) update(changed []types.NamespacedName) {
	now := make([]*listedService, 0, len(changed))
	done := make(map[types.NamespacedName]struct{}, len(changed))
	for _, name := range changed {
		if _, again := done[name]; again {
			continue
		}
		done[name] = struct{}{}
		if s := x.indexed.listed(name); s != nil {
			now = append(now, s)
		}
	}
	sortByName(now)
	x.sorted = merged(x.sorted, now, done)
}

// merged returns a new list of the old Services that have not changed, and the others.
func merged(old, others []*listedService, changed map[types.NamespacedName]struct{}) []*listedService {
	all := make([]*listedService, 0, len(old)+len(others))
	for _, s := range old {
		if _, ok := changed[s.name]; ok {
			continue
		}
		for len(others) > 0 && compareNames(others[0].name, s.name) < 0 {
			all, others = append(all, others[0]), others[1:]
		}
		all = append(all, s)
	}
	return append(all, others...)
}

// listed returns a Service, or nil if it has no service ports.
func (p *resolved) listed(name types.NamespacedName) *listedService {
	d := newDraft(name)
	p.servicePorts(name, func(family *desired.Resolved, port changetracker.ServicePortName) {
		if s, ok := family.Service(port); ok {
			d.add(family, s)
		}
	})
	return d.finish()
}

// draft is a Service whose service ports are being added.
type draft struct {
	listedService

	actionCounts actionCounts
	ports        int
	last         netip.Addr
	lines        []byte
}

func newDraft(name types.NamespacedName) *draft {
	clean := func(text string) string { return strings.ToLower(strings.ReplaceAll(text, "\n", " ")) }
	return &draft{
		listedService: listedService{name: name},
		lines:         []byte("\n" + clean(name.Namespace+"/"+name.Name) + "\n" + clean(name.Name) + "\n"),
	}
}

func (d *draft) add(family *desired.Resolved, s *desired.Service) {
	endpoints := family.State().Endpoints(s.Name)
	d.ports++
	d.actionCounts.add(s)
	d.filters |= filtersOf(s, endpoints)
	d.addresses(s.Port, endpoints)
}

// finish returns nil if there are no service ports.
func (d *draft) finish() *listedService {
	if d.ports == 0 {
		return nil
	}
	return &listedService{name: d.name, text: string(d.lines), verdict: d.actionCounts.verdict(), filters: d.filters}
}

func (d *draft) addresses(p *changetracker.ServicePort, endpoints []changetracker.Endpoint) {
	d.address(p.ClusterIP)
	for _, list := range [...][]netip.Addr{p.ExternalIPs, p.LoadBalancerVIPs} {
		for _, vip := range list {
			d.address(vip)
		}
	}
	if p.NodePort != 0 {
		d.lines = append(strconv.AppendUint(d.lines, uint64(p.NodePort), 10), '\n')
	}
	for i := range endpoints {
		if a := endpoints[i].Addr.Addr(); a != d.last {
			d.address(a)
			d.last = a
		}
	}
}

func (d *draft) address(a netip.Addr) {
	if a.IsValid() {
		d.lines = append(a.AppendTo(d.lines), '\n')
	}
}
