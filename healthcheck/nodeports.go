package healthcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

const (
	// addressPeriod is how often the node's addresses are looked at.
	addressPeriod = 10 * time.Second
	// firstRetry and longestRetry are how soon a port that cannot be listened on is
	// tried again.
	firstRetry   = time.Second
	longestRetry = 30 * time.Second
)

// NodePortOptions configure NodePorts. The zero value is ready for use.
type NodePortOptions struct {
	// Logger hears once about each listener that fails, and when it works again; nil
	// is silent.
	Logger *zap.Logger
	// Threshold is how long a change may wait to be programmed; 0 means 60s. After
	// it all answers are 503.
	Threshold time.Duration
	// Addresses returns the addresses of the node's interfaces; nil means
	// net.InterfaceAddrs, which does not tell the zones of link-local addresses, so
	// that these are not listened on. It is asked only if node ports are limited to
	// some addresses.
	Addresses func(ctx context.Context) ([]netip.Addr, error)
	// Listen opens the listeners; nil means net.ListenConfig.Listen.
	Listen ListenFunc
}

// NodePorts answers at the health check node ports of Services, in all families. If
// all addresses accept node ports, it has one listener for each Service, and
// otherwise one for each Service and address. All methods may be called from
// several goroutines at once.
type NodePorts struct {
	options NodePortOptions
	log     *zap.Logger
	wake    chan struct{} // holds one request to look at the book
	known   []netip.Addr  // the node's addresses; owned by the goroutine of Run

	mu        sync.Mutex // guards all below
	started   bool
	book      book
	listeners map[site]*listener // those that Run owns
	missing   map[v1.IPFamily]proxier.Condition
}

var _ proxier.Health = (*NodePorts)(nil)

// listener is the server of one site.
type listener struct {
	*Server
	stop context.CancelFunc
	free chan struct{} // closed when it has been stopped and its address is free
}

// NewNodePorts returns NodePorts that listen nowhere before Run and the first
// Update.
func NewNodePorts(options NodePortOptions) *NodePorts {
	if options.Addresses == nil {
		options.Addresses = interfaceAddresses
	}
	return &NodePorts{
		options: options, log: cmp.Or(options.Logger, zap.NewNop()), wake: make(chan struct{}, 1),
		book: book{pages: map[v1.IPFamily]*page{}}, listeners: map[site]*listener{},
	}
}

// Update implements proxier.Health. It neither blocks nor does I/O.
func (n *NodePorts) Update(family v1.IPFamily, update proxier.HealthUpdate) {
	n.mu.Lock()
	look := n.book.update(family, update) || n.book.selective()
	n.mu.Unlock()
	if !look {
		return
	}
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Run implements proxier.Health. It may be called once. Without a status the proxy
// counts as healthy.
func (n *NodePorts) Run(ctx context.Context, status func() proxier.Status) error {
	n.mu.Lock()
	again := n.started
	n.started = true
	n.mu.Unlock()
	if again {
		return errors.New("node ports were run before")
	}
	var serving sync.WaitGroup
	a := &answerer{ports: n, judgement: judgement{status: status, threshold: n.options.Threshold}}
	tick := time.NewTicker(addressPeriod)
	defer tick.Stop()
	for ctx.Err() == nil {
		n.look(ctx, a, &serving)
		select {
		case <-n.wake:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	serving.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.listeners)
	clear(n.missing)
	return nil
}

// look makes what listens what should listen.
func (n *NodePorts) look(ctx context.Context, a *answerer, serving *sync.WaitGroup) {
	err := n.lookAtAddresses(ctx)
	if ctx.Err() != nil {
		return
	}
	want, gone := n.plan(err)
	// What comes may need the addresses of what goes.
	for _, l := range gone {
		<-l.free
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for at := range want {
		if n.listeners[at] == nil {
			n.listeners[at] = n.listen(ctx, at, a, serving)
		}
	}
}

// plan says where to listen, stops the other listeners, and returns them. err is
// why the node's addresses are not known.
func (n *NodePorts) plan(err error) (want map[site]struct{}, gone []*listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	want = n.book.sites(n.known)
	n.missLocked(err)
	for at, l := range n.listeners {
		if _, stays := want[at]; !stays {
			l.stop()
			delete(n.listeners, at)
			gone = append(gone, l)
		}
	}
	return want, gone
}

func (n *NodePorts) listen(ctx context.Context, at site, a *answerer, serving *sync.WaitGroup) *listener {
	ctx, stop := context.WithCancel(ctx)
	free := make(chan struct{})
	l := &listener{stop: stop, free: free, Server: &Server{
		Name: "health check node port of " + at.service.String(), Address: at.address, Handler: a.handler(at.service),
		Logger: n.log, Listen: n.options.Listen, network: at.network,
		retry: backoff{first: firstRetry, longest: longestRetry}, released: sync.OnceFunc(func() { close(free) }),
	}}
	serving.Go(func() {
		defer stop()
		_ = l.Run(ctx) // never fails
	})
	return l
}

// lookAtAddresses keeps the last known addresses if they cannot be listed: what
// listens is better than nothing, and better than too much.
func (n *NodePorts) lookAtAddresses(ctx context.Context) error {
	n.mu.Lock()
	selective := n.book.selective()
	n.mu.Unlock()
	if !selective {
		return nil
	}
	known, err := n.options.Addresses(ctx)
	if err == nil {
		n.known = known
	}
	return err
}

func interfaceAddresses(context.Context) ([]netip.Addr, error) {
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list addresses of interfaces: %w", err)
	}
	var addresses []netip.Addr
	for _, i := range interfaces {
		if p, err := netip.ParsePrefix(i.String()); err == nil {
			addresses = append(addresses, p.Addr())
		}
	}
	return addresses, nil
}

// Conditions implements proxier.Health: what cannot be listened on, sorted by
// family and message.
func (n *NodePorts) Conditions() []proxier.Condition {
	n.mu.Lock()
	defer n.mu.Unlock()
	conditions := slices.Collect(maps.Values(n.missing))
	now := time.Now()
	for at, l := range n.listeners {
		since, err := l.failure.current(now)
		if err == nil {
			continue
		}
		conditions = append(conditions, proxier.Condition{
			Type: proxier.ConditionHealthCheckPort, Family: at.family, Since: since,
			Message: fmt.Sprintf("load balancers get no answer about Service %s at %s: %v; %s", at.service, at.address, err, advice(err)),
		})
	}
	slices.SortFunc(conditions, func(a, b proxier.Condition) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Message, b.Message))
	})
	return conditions
}

// missLocked renews the conditions about missing addresses; n.mu is held. err is
// why the addresses could not be listed.
func (n *NodePorts) missLocked(err error) {
	before := n.missing
	n.missing = map[v1.IPFamily]proxier.Condition{}
	miss := func(family v1.IPFamily, message string) {
		since := time.Now()
		if old, ok := before[family]; ok {
			since = old.Since
		}
		n.missing[family] = proxier.Condition{Type: proxier.ConditionHealthCheckPort, Family: family, Since: since, Message: message}
		if before[family].Message != message {
			n.log.Warn("nowhere to listen for load balancers", zap.String("family", string(family)), zap.String("reason", message))
		}
	}
	if err != nil {
		miss("", fmt.Sprintf("the node's addresses are not known, which health check node ports listen on: %v; it is tried again every %v", err, addressPeriod))
		return
	}
	for family, p := range n.book.pages {
		if p.selective() && len(matching(p.ranges, n.known)) == 0 {
			miss(family, fmt.Sprintf("load balancers get no answer about %d Services: the node has no address in %s; "+
				"give it one, or change the node port addresses", len(p.services), join(p.ranges)))
		}
	}
}

func join(ranges []netip.Prefix) string {
	var texts []string
	for _, r := range ranges {
		texts = append(texts, r.String())
	}
	return strings.Join(texts, ", ")
}
