package healthcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/neterror"
	"github.com/serviceplane/serviceplane/proxier"
)

const (
	// addressPeriod is how often the node's addresses are read.
	addressPeriod = 10 * time.Second
	// firstRetry and longestRetry bound the backoff after a failure to listen.
	firstRetry   = time.Second
	longestRetry = 30 * time.Second
)

// NodePortOptions configure NewNodePortServer. The zero value is ready for use.
type NodePortOptions struct {
	// Logger receives one line when a listener fails, and one when it works again; nil
	// means no logging.
	Logger *zap.Logger
	// Threshold is how long a change may wait to be programmed; 0 means 60s. After
	// that all answers are 503.
	Threshold time.Duration
	// Addresses returns the addresses of the node's interfaces; nil means
	// net.InterfaceAddrs, which returns link-local addresses without their zones, so that
	// the server does not listen on them. It is called only if node ports are limited to
	// some addresses.
	Addresses func(ctx context.Context) ([]netip.Addr, error)
	// Listen opens the listeners; nil means net.ListenConfig.Listen.
	Listen func(ctx context.Context, network, address string) (net.Listener, error)
}

// nodePortServer is the Health of NewNodePortServer.
type nodePortServer struct {
	options NodePortOptions
	log     *zap.Logger
	wake    chan struct{} // holds one request to update the listeners
	clients *connections  // of all listeners together
	addrs   []netip.Addr  // the node's addresses; owned by the goroutine of Run

	started atomic.Bool

	mu        sync.Mutex // guards all below
	ports     portTable
	listeners map[listenKey]*listener // owned by Run
	noAddress map[v1.IPFamily]proxier.Condition
}

var _ proxier.Health = (*nodePortServer)(nil)

// listener is the server at one address.
type listener struct {
	*Server
	stop context.CancelFunc
	free chan struct{} // closed when it was stopped and its address is free
}

// NewNodePortServer returns a Health that answers at the health check node ports of Services, at every address of the
// node that accepts node ports of any family, whatever the families of the Service. It listens after Run was called
// and the first Update has arrived. If all addresses accept node ports, it has one listener per Service, and
// otherwise one per Service and address. Its Conditions are sorted by family and message. If the status of Run is
// nil, the proxy counts as healthy.
func NewNodePortServer(options NodePortOptions) proxier.Health { return newNodePortServer(options) }

func newNodePortServer(options NodePortOptions) *nodePortServer {
	if options.Addresses == nil {
		options.Addresses = interfaceAddresses
	}
	return &nodePortServer{
		options: options, log: cmp.Or(options.Logger, zap.NewNop()), wake: make(chan struct{}, 1), clients: newConnections(maxNodePortConnections),
		ports: portTable{families: map[v1.IPFamily]*familyPorts{}}, listeners: map[listenKey]*listener{},
	}
}

// Update implements proxier.Health. It neither blocks nor does I/O.
func (n *nodePortServer) Update(family v1.IPFamily, update proxier.HealthUpdate) {
	n.mu.Lock()
	wake := n.ports.update(family, update) || n.ports.needsAddresses()
	n.mu.Unlock()
	if !wake {
		return
	}
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Run implements proxier.Health. It may be called once. If status is nil, the proxy counts
// as healthy.
func (n *nodePortServer) Run(ctx context.Context, status func() proxier.Status) error {
	if n.started.Swap(true) {
		return errors.New("serve health check node ports: Run was called twice")
	}
	var serving sync.WaitGroup
	a := &answerer{localEndpoints: n.localEndpoints, status: status, threshold: n.options.Threshold}
	tick := time.NewTicker(addressPeriod)
	defer tick.Stop()
	for ctx.Err() == nil {
		n.updateListeners(ctx, a, &serving)
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
	clear(n.noAddress)
	return nil
}

func (n *nodePortServer) localEndpoints(service types.NamespacedName, family v1.IPFamily) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ports.local(service, family)
}

// updateListeners starts and stops listeners as the port table requires.
func (n *nodePortServer) updateListeners(ctx context.Context, a *answerer, serving *sync.WaitGroup) {
	err := n.readAddresses(ctx)
	if ctx.Err() != nil {
		return
	}
	want, stopped := n.stopUnwanted(err)
	for _, l := range stopped {
		<-l.free // a new listener may need the address
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for key := range want {
		if n.listeners[key] == nil {
			n.listeners[key] = n.listen(ctx, key, a, serving)
		}
	}
}

// stopUnwanted returns where to listen, and stops the other listeners. addrErr is why the
// node's addresses are not known.
func (n *nodePortServer) stopUnwanted(addrErr error) (want map[listenKey]struct{}, stopped []*listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	want = n.ports.keys(n.addrs)
	n.updateNoAddressLocked(addrErr)
	for key, l := range n.listeners {
		if _, wanted := want[key]; !wanted {
			l.stop()
			delete(n.listeners, key)
			stopped = append(stopped, l)
		}
	}
	return want, stopped
}

func (n *nodePortServer) listen(ctx context.Context, key listenKey, a *answerer, serving *sync.WaitGroup) *listener {
	ctx, stop := context.WithCancel(ctx)
	free := make(chan struct{})
	l := &listener{stop: stop, free: free, Server: &Server{
		Name: "health check node port of " + key.service.String(), Address: key.address, Handler: a.handler(key.service),
		Logger: n.log, Listen: n.options.Listen, network: key.network, clients: n.clients,
		retry: backoff{first: firstRetry, longest: longestRetry}, released: sync.OnceFunc(func() { close(free) }),
	}}
	serving.Go(func() {
		defer stop()
		_ = l.Run(ctx) // never fails
	})
	return l
}

// readAddresses keeps the last known addresses if they cannot be read, so that existing
// listeners stay, and no others are added.
func (n *nodePortServer) readAddresses(ctx context.Context) error {
	n.mu.Lock()
	needed := n.ports.needsAddresses()
	n.mu.Unlock()
	if !needed {
		return nil
	}
	addrs, err := n.options.Addresses(ctx)
	if err == nil {
		n.addrs = addrs
	}
	return err
}

func interfaceAddresses(context.Context) ([]netip.Addr, error) {
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list the addresses of interfaces: %w", err)
	}
	var addresses []netip.Addr
	for _, i := range interfaces {
		if p, err := netip.ParsePrefix(i.String()); err == nil {
			addresses = append(addresses, p.Addr())
		}
	}
	return addresses, nil
}

// Conditions implements proxier.Health. They are sorted by family and message.
func (n *nodePortServer) Conditions() []proxier.Condition {
	n.mu.Lock()
	defer n.mu.Unlock()
	conditions := slices.Collect(maps.Values(n.noAddress))
	now := time.Now()
	for key, l := range n.listeners {
		since, err := l.failure.current(now)
		if err == nil {
			continue
		}
		conditions = append(conditions, proxier.Condition{
			Type: proxier.ConditionHealthCheckPort, Family: key.family, Since: since,
			Message: fmt.Sprintf("health check node port of Service %s does not answer at %s: %v: %s", key.service, key.address, err, advice(err)),
		})
	}
	slices.SortFunc(conditions, func(a, b proxier.Condition) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Message, b.Message))
	})
	return conditions
}

// updateNoAddressLocked updates the conditions about missing addresses. err is why the
// node's addresses are not known.
func (n *nodePortServer) updateNoAddressLocked(err error) {
	before := n.noAddress
	n.noAddress = map[v1.IPFamily]proxier.Condition{}
	set := func(family v1.IPFamily, message string) {
		since := time.Now()
		if old, ok := before[family]; ok {
			since = old.Since
		}
		n.noAddress[family] = proxier.Condition{Type: proxier.ConditionHealthCheckPort, Family: family, Since: since, Message: message}
		if before[family].Message != message {
			n.log.Warn("no address to listen on for health checks of load balancers", zap.String("family", string(family)), zap.String("reason", message))
		}
	}
	if err != nil {
		set("", fmt.Sprintf("addresses for health check node ports are not known: %v: will be retried every %v", err, addressPeriod))
		return
	}
	for family, p := range n.ports.families {
		if len(p.services) > 0 && p.limited() && len(matching(p.ranges, n.addrs)) == 0 {
			set(family, fmt.Sprintf("health check node ports of %d Services do not answer: the node has no address in %s: "+
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

// advice returns what an operator can do about a failure to listen.
func advice(err error) string {
	switch {
	case neterror.NotAvailable.Is(err):
		return "check that the node still has the address"
	case neterror.NoDescriptors.Is(err):
		return "raise the limit of open files, or find the program that holds so many"
	case errors.Is(err, fs.ErrPermission):
		return "permit this program to listen on that port"
	default:
		return "stop the program that listens there, or give the Service another healthCheckNodePort"
	}
}
