package refusals

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/oracle"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

var (
	full      = flag.Bool("refusals.full", false, "send every packet, not a part by chance")
	firstSeed = flag.Uint64("refusals.seed", 0, "the seed of the chance; 0 takes a new one")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// trial is a packet of a sender, and what has become of it.
type trial struct {
	sender

	packet   packet
	what     string             // its destination, for the table
	verdicts []*oracle.Verdicts // any of them may have decided
	kept     []netip.AddrPort   // endpoints of the flow
	err      error              // of sending

	mu       sync.Mutex
	receipts []receipt // guarded by mu; some come late, such as a repeated SYN ACK
}

func (s *trial) record(r receipt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.receipts = append(s.receipts, r)
}

// received returns what has come so far.
func (s *trial) received() []receipt {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.receipts)
}

// outcomes are what may become of the packet.
func (s *trial) outcomes() (all []oracle.Outcome) {
	if s.isImpossible() {
		return []oracle.Outcome{{Verdict: "drop"}}
	}
	for _, f := range s.verdicts {
		all = append(all, f.Of(oracle.Packet{
			Protocol: s.packet.protocol, Source: s.packet.source, Destination: s.packet.destination, FromNode: s.host == nodeName,
		})...)
	}
	return all
}

// isImpossible: the packet has an address that no packet on a link may have.
func (s *trial) isImpossible() bool {
	return s.impossible || s.host != nodeName && s.packet.destination.Addr().IsLoopback()
}

// isPositive: the packet must reach an endpoint.
func (s *trial) isPositive() bool {
	return !slices.ContainsFunc(s.outcomes(), func(o oracle.Outcome) bool { return o.Verdict != "forward" })
}

// isNegative: the packet may not reach any endpoint.
func (s *trial) isNegative() bool {
	return !slices.ContainsFunc(s.outcomes(), func(o oracle.Outcome) bool { return o.Verdict == "forward" })
}

// leak returns what should not have arrived, or "".
func (s *trial) leak() string {
	all := s.outcomes()
	for _, r := range s.received() {
		if !slices.ContainsFunc(all, func(o oracle.Outcome) bool { return s.allows(o, r) }) && !slices.Contains(s.kept, r.to) {
			if r.accepted {
				return "accepted: a SYN ACK came back"
			}
			return fmt.Sprintf("%s got it, to %v", r.host, r.to)
		}
	}
	return ""
}

func (s *trial) allows(o oracle.Outcome, r receipt) bool {
	switch {
	case s.isImpossible():
		return false
	case r.accepted:
		return o.Verdict == "forward" || o.Verdict == "pass"
	case o.Verdict == "forward":
		return r.to == o.Endpoint
	default:
		untranslated := r.to.Addr() == s.packet.destination.Addr() && (r.to.Port() == 0 || r.to == s.packet.destination)
		return untranslated && (o.Verdict == "pass" || s.isInvalid())
	}
}

// isInvalid: conntrack, and so rules of NAT, know nothing of the packet.
func (s *trial) isInvalid() bool {
	return s.packet.badChecksum || s.packet.protocol == desired.TCP && s.packet.flags != syn && s.packet.flags != ack
}

func (s *trial) String() string {
	return fmt.Sprintf("from %s (%v at %s) to %s: %v %v flags %#x", s.name, s.packet.source, s.host, s.what, s.packet.protocol, s.packet.destination, s.packet.flags)
}

// destination is an address and port, and how it is called in the table.
type destination struct {
	what string
	to   netip.AddrPort
}

// destinations are the addresses of a Service with its ports and others, and addresses that are
// not its own.
func destinations(c *oracle.Cluster, n int, family v1.IPFamily) (all []destination) {
	add := func(what, address string, port int) {
		all = append(all, destination{what, netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port))})
	}
	var external []string
	if s := c.Services[name(n)]; s != nil {
		external = s.Spec.ExternalIPs
	}
	nodePort, own := firstNodePort+n, map[string]bool{}
	for i, kind := range []string{"ClusterIP", "external IP", "load balancer IP"} {
		vip := vips(n, family)[i]
		own[vip] = true
		add(kind, vip, servicePort)
		add(kind+", neighbour port", vip, servicePort+1)
		add(kind+", node port", vip, nodePort)
		add(kind+", health check port", vip, firstHealth+n)
		add(kind+", port of the endpoint", vip, 8080)
	}
	for _, text := range external {
		if a := netip.MustParseAddr(text); a.Is4() == (family == v1.IPv4Protocol) && !own[text] {
			add("external IP that is not allowed", text, servicePort)
		}
	}
	for _, a := range c.Node.Addresses {
		if a.Is4() == (family == v1.IPv4Protocol) {
			add("node port", a.String(), nodePort)
			add("node port, neighbour port", a.String(), nodePort+500)
			add("health check port", a.String(), firstHealth+n)
			add("node address, port of the Service", a.String(), servicePort)
		}
	}
	loopback, others := []string{"127.0.0.1", "127.0.0.5"}, []string{"192.0.2.1", "10.96.200.200", "224.0.0.1"}
	if family == v1.IPv6Protocol {
		loopback, others = []string{"::1"}, []string{"2001:db8:2::1", "fd00:10:96::fff0", "ff02::1"}
	}
	for _, address := range loopback {
		add("loopback, node port", address, nodePort)
		add("loopback, port of the Service", address, servicePort)
		add("loopback, port of a program", address, programPort)
	}
	for i, what := range []string{"another node", "free ClusterIP", "multicast"} {
		add(what+", node port", others[i], nodePort)
		add(what+", port of the Service", others[i], servicePort)
	}
	return all
}

// kinds returns a packet of each kind, for each destination.
func kinds(family v1.IPFamily) []packet {
	echo := desired.Protocol(unix.IPPROTO_ICMP)
	if family == v1.IPv6Protocol {
		echo = unix.IPPROTO_ICMPV6
	}
	return []packet{
		{protocol: desired.TCP, flags: syn},
		{protocol: desired.UDP},
		{protocol: desired.SCTP},
		{protocol: experimental},
		{protocol: echo},
		{protocol: desired.TCP, flags: ack}, // conntrack picks it up
		{protocol: desired.TCP},
		{protocol: desired.TCP, flags: syn | fin},
		{protocol: desired.TCP, flags: syn | ack},
		{protocol: desired.TCP, flags: rst},
		{protocol: desired.TCP, flags: syn, badChecksum: true},
		{protocol: desired.UDP, badChecksum: true},
	}
}

// engine is one way to program Services.
type engine struct {
	name   string
	create func(config proxier.Config) (*proxier.Proxier, error)
	// passes is the trait ServiceIPsPass.
	passes bool
	// localhost is the trait LoopbackNodePorts.
	localhost bool
	// ownsVIPs means the traits LocalPolicyBindsAll and VIPsAreLocal.
	ownsVIPs bool
	// sockets means that endpoints see no TCP packets of clients.
	sockets bool
	// clashes means that an answer of UDP that comes while its flow is forgotten keeps the client's port from
	// that endpoint for 30 seconds: docs/ENGINES.md says why.
	clashes bool
	// join, if not nil, lets sockets of a network namespace be translated.
	join func(netNS string)
}

func engines() []engine {
	return []engine{
		{name: "nftables", create: func(c proxier.Config) (*proxier.Proxier, error) {
			return nftables.New(nftables.Config{Config: c}, proxier.Deps{})
		}},
		{name: "iptables-nft", passes: true, create: newIPTables(iptables.VariantNFT, false)},
		{name: "iptables-legacy", passes: true, create: newIPTables(iptables.VariantLegacy, false)},
		{name: "iptables-nft with localhost", passes: true, localhost: true, create: newIPTables(iptables.VariantNFT, true)},
		{name: "userspace", sockets: true, create: newUserspace(0, func(c proxier.Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
			return nftables.NewEngine(nftables.Config{Config: c}, family, deps)
		})},
	}
}

func newIPTables(variant iptables.Variant, localhost bool) func(proxier.Config) (*proxier.Proxier, error) {
	return func(c proxier.Config) (*proxier.Proxier, error) {
		return iptables.New(iptables.Config{Config: c, Variant: variant, RouteLocalnet: localhost}, proxier.Deps{})
	}
}

// newUserspace returns proxies of sockets, with an engine of rules in front. Their connections may last for linger when
// they end.
func newUserspace(linger time.Duration, portals func(proxier.Config, v1.IPFamily, proxier.Deps) (proxier.Engine, error)) func(proxier.Config) (*proxier.Proxier, error) {
	return func(c proxier.Config) (*proxier.Proxier, error) {
		deps := proxier.Deps{Conntrack: conntrack.New(conntrack.Options{NetNS: c.NetNS})}
		return userspace.New(userspace.Config{Config: c, ShareNodePorts: true, Linger: linger, Portals: func(family v1.IPFamily) (proxier.Engine, error) {
			return portals(c, family, deps)
		}}, deps)
	}
}

// cleansUp removes what a proxy has in the kernel, when the test ends and Run has returned.
func cleansUp(t *testing.T, p *proxier.Proxier) {
	t.Helper()
	t.Cleanup(func() {
		if err := p.Cleanup(context.WithoutCancel(t.Context())); err != nil {
			t.Errorf("Cleanup = %v", err)
		}
	})
}

// bench is a running engine in a network.
type bench struct {
	*wire

	t       *testing.T
	engine  engine
	world   *proxiertest.Topology
	cluster *oracle.Cluster
	proxy   *proxier.Proxier
	dice    *rand.Rand
	ports   uint16
	toggles int
}

func newBench(t *testing.T, e engine, s setting, specs []spec) *bench {
	t.Helper()
	if *firstSeed == 0 {
		*firstSeed = rand.Uint64N(1 << 32)
	}
	b := &bench{t: t, engine: e, world: proxiertest.NewTopology(t), dice: rand.New(rand.NewPCG(*firstSeed, 6))}
	t.Logf("replay with -refusals.seed=%d", *firstSeed)
	b.wire, b.cluster = newWire(t, b.world), newCluster(t, b.world, s)
	for i, spec := range specs {
		add(b.cluster, b.world, i+1, spec)
	}
	p, err := e.create(config(b.world, b.cluster))
	if err != nil {
		t.Fatal(err)
	}
	b.proxy = p
	for _, s := range b.cluster.Services {
		p.OnServiceAdd(s)
	}
	for _, s := range b.cluster.Slices {
		p.OnEndpointSliceAdd(s)
	}
	p.OnServiceCIDRsChanged(b.cluster.ServiceCIDRs)
	cleansUp(t, p)
	proxiertest.Run(t, p)
	b.sync()
	return b
}

func (b *bench) sync() {
	b.t.Helper()
	if err := proxiertest.Sync(b.t.Context(), b.proxy); err != nil {
		b.t.Fatalf("Sync = %v", err)
	}
}

// verdicts decides about packets, for each family.
func (b *bench) verdicts() (all [2]*oracle.Verdicts) {
	for i, family := range families() {
		all[i] = oracle.NewVerdicts(b.cluster, family)
		all[i].ServiceIPsPass, all[i].LoopbackNodePorts = b.engine.passes, b.engine.localhost
		all[i].LocalPolicyBindsAll, all[i].VIPsAreLocal = b.engine.ownsVIPs, b.engine.ownsVIPs
	}
	return all
}

// port is the next source port.
func (b *bench) port() uint16 {
	b.ports++
	return 10000 + b.ports%50000
}

// matrix returns packets that must be refused, about so many of each state, and one to each
// destination that must arrive.
func (b *bench) matrix(specs []spec) (negatives, positives []*trial) {
	all, verdicts := senders(b.world), b.verdicts()
	share := 1.0
	if !*full {
		share = 6 / float64(len(specs)*len(all)) // of about 1,200 destinations and kinds for each
	}
	for n := range specs {
		for _, family := range families() {
			for _, d := range destinations(b.cluster, n+1, family) {
				for _, kind := range kinds(family) {
					for _, sender := range all {
						if b.dice.Float64() >= share {
							continue
						}
						kind.source, kind.destination = netip.AddrPortFrom(sender.addr(family), b.port()), d.to
						s := &trial{sender: sender, packet: kind, what: d.what, verdicts: verdicts[index(family):][:1]}
						switch {
						case s.isNegative():
							negatives = append(negatives, s)
						case sender.honest && b.mustArrive(s):
							positives = append(positives, s)
						}
					}
				}
			}
		}
	}
	return negatives, positives
}

// mustArrive: the packet opens a connection, and a host sees that it got through.
func (b *bench) mustArrive(s *trial) bool {
	p := s.packet
	return !p.badChecksum && (p.protocol == desired.UDP || p.protocol == desired.TCP && p.flags == syn && (!b.engine.sockets || s.host != nodeName))
}

// TestRefusals sends what must be refused: while there is no entry of conntrack, and while
// clients have allowed connections with the same ports.
func TestRefusals(t *testing.T) {
	for _, e := range engines() {
		t.Run(e.name, func(t *testing.T) {
			for _, s := range chance.Some(t, 1, settings()...) {
				t.Run(s.name, func(t *testing.T) { refuse(t, e, s) })
			}
		})
	}
}

func refuse(t *testing.T, e engine, s setting) {
	t.Helper()
	b := newBench(t, e, s, specs())
	negatives, positives := b.matrix(specs())
	b.sendAll(negatives)
	b.sendAll(positives)
	b.awaitAll(positives)
	var beside []*trial
	port := b.port()
	for _, trials := range [][]*trial{positives, negatives} {
		var again []*trial
		for _, s := range trials {
			other := &trial{sender: s.sender, packet: s.packet, what: s.what, verdicts: s.verdicts}
			other.packet.source = netip.AddrPortFrom(s.packet.source.Addr(), port)
			again = append(again, other)
		}
		b.sendAll(again)
		beside = again
	}
	b.report(map[string][]*trial{"no entry": negatives, "beside an allowed flow": beside}, 2000)
}

// window is how many packets are on their way at a time, so that no queue overflows.
const window = 128

func (b *bench) sendAll(all []*trial) {
	b.t.Helper()
	onOneProcessor(b.t, func() {
		for some := range slices.Chunk(all, window) {
			for _, s := range some {
				b.send(s)
			}
			b.flush(b.t)
		}
	})
}

// awaitAll sends those that have not arrived again. A proxy of sockets forwards later than the
// kernel, and not what waits in the queue of a socket that it closes.
func (b *bench) awaitAll(all []*trial) {
	b.t.Helper()
	poll.Nil(b.t, "allowed packets arrive", func() error {
		var missing []*trial
		for _, s := range all {
			if len(s.received()) == 0 {
				if s.packet.source.Port() != flowPort {
					s.packet.source = netip.AddrPortFrom(s.packet.source.Addr(), b.port())
				}
				missing = append(missing, s)
			}
		}
		if len(missing) == 0 {
			return nil
		}
		b.sendAll(missing)
		return fmt.Errorf("%d of %d did not, such as %v: %v", len(missing), len(all), missing[0], missing[0].outcomes())
	})
}

// report counts the packets, and fails for each kind that got through.
func (b *bench) report(all map[string][]*trial, atLeast int) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	seen, total, leaked := map[string]int{}, 0, 0
	leaks := map[string]string{}
	for _, state := range slices.Sorted(maps.Keys(all)) {
		for _, s := range all[state] {
			total++
			for _, what := range s.labels(state) {
				seen[what]++
			}
			if leak := s.leak(); leak != "" {
				leaked++
				leaks[s.name+", "+s.what] = fmt.Sprintf("%s: %v: %s, want %v", state, s, leak, s.outcomes())
			}
		}
	}
	for _, leak := range leaks {
		b.t.Error(leak)
	}
	var lines []string
	for what, n := range seen {
		lines = append(lines, fmt.Sprintf("%7d %s", n, what))
	}
	slices.SortFunc(lines, func(a, b string) int { return strings.Compare(a[8:], b[8:]) })
	b.t.Logf("%d packets to be refused, %d got through\n%s", total, leaked, strings.Join(lines, "\n"))
	if total < atLeast {
		b.t.Errorf("%d packets to be refused, want %d or more", total, atLeast)
	}
}

// labels are what the packet counts as.
func (s *trial) labels(state string) []string {
	all := []string{"from " + s.name, "to " + s.what, "state: " + state}
	if s.isInvalid() {
		all[2] += ", INVALID"
	}
	if s.err != nil {
		all = append(all, "refused by the sender's own kernel")
	}
	return all
}
