package packetcost

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/userspace"
)

const servicePort, nodePort, endpointPort = 80, 30080, 9000

// service has a load balancer's address, a node port and a port of UDP if it is measured.
type service struct{ clusterIP, loadBalancer netip.Addr }

func (s service) isMeasured() bool { return s.loadBalancer.IsValid() }

func (s service) protocols() []string {
	if s.isMeasured() {
		return []string{"tcp", "udp"}
	}
	return []string{"tcp"}
}

// road is a network with one way to Services.
type road struct {
	way
	world     *proxiertest.Topology
	services  []service
	endpoints []netip.AddrPort

	figures map[string][]float64 // by unit
	flows   int                  // that began with a packet of no client
	during  func(measure func()) // surrounds a measurement
}

// way programs a road.
type way struct {
	name    string
	program func(*testing.B, *road)
	most    int  // Services; 0 means any number
	direct  bool // clients know an endpoint
	podsTCP bool // nothing else reaches the Service
}

var ways = []way{ // read-only
	{name: "nothing", program: func(*testing.B, *road) {}, direct: true},
	{name: "conntrack", program: trackOnly, direct: true},
	{name: "nftables", program: throughNFTables},
	{name: "ebpf", program: throughSockets},
	{name: "ebpf-without-rules", program: throughSocketsAlone, podsTCP: true},
	{name: "iptables-nft", program: throughIPTables(iptables.VariantNFT), most: 10_000},
	{name: "iptables-legacy", program: throughIPTables(iptables.VariantLegacy), most: 10_000},
	{name: "userspace", program: throughUserspace, most: 10},
	{name: "kube-proxy-nftables", program: likeNFTables},
	{name: "kube-proxy-iptables-nft", program: likeIPTables("iptables-nft-restore"), most: 10_000},
	{name: "kube-proxy-iptables-legacy", program: likeIPTables("iptables-legacy-restore"), most: 10_000},
}

// BenchmarkPackets measures all ways in turn, in one run: connect(2) to a ClusterIP, a node port and
// a load balancer's address, requests over TCP with and without a connection of their own, requests
// over UDP, throughput, datagrams a second, and the CPU time of a first packet. The Service is in
// the middle of the others.
func BenchmarkPackets(b *testing.B) {
	sizes, rounds, effort := []int{10}, 1, 20
	if os.Getenv("SERVICEPLANE_BENCH_FULL") == "1" {
		sizes, rounds, effort = []int{10, 10_000, 30_000}, 7, 500
	}
	for _, n := range sizes {
		b.Run(fmt.Sprintf("N=%d", n), func(b *testing.B) {
			var roads []*road
			for _, w := range ways {
				if w.most == 0 || n <= w.most {
					roads = append(roads, newRoad(b, w, n))
				}
			}
			for range rounds {
				for _, r := range roads {
					r.during(func() { r.measure(b, effort) })
				}
			}
			for _, r := range roads {
				b.Run(r.name, func(b *testing.B) {
					for unit, values := range r.figures {
						slices.Sort(values)
						b.ReportMetric(values[len(values)/2], unit)
					}
					b.ReportMetric(0, "ns/op")
				})
			}
		})
	}
}

func newRoad(b *testing.B, w way, n int) *road {
	b.Helper()
	r := &road{way: w, world: proxiertest.NewTopology(b), figures: map[string][]float64{}, during: func(measure func()) { measure() }}
	for _, pod := range r.world.LocalPods[:2] {
		serve(b, pod, endpointPort)
		r.endpoints = append(r.endpoints, netip.AddrPortFrom(pod.Addr(v1.IPv4Protocol), endpointPort))
	}
	ip := netip.MustParseAddr("10.96.0.10")
	for i := range n {
		r.services = append(r.services, service{clusterIP: ip})
		if i == n/2 {
			r.services[i].loadBalancer = netip.MustParseAddr("10.99.0.1")
		}
		ip = ip.Next()
	}
	w.program(b, r)
	return r
}

func nodeAddr(r *road) netip.Addr { return r.world.Node.Addr(v1.IPv4Protocol) }

func (r *road) config() proxier.Config {
	c := r.world.Config()
	c.Families = []v1.IPFamily{v1.IPv4Protocol}
	return c
}

// run gives a Provider all Services, and waits for its first sync.
func (r *road) run(b *testing.B, p *proxier.Proxier, err error) {
	b.Helper()
	netnstest.Check(b, err)
	r.announce(p)
	proxiertest.Run(b, p)
	netnstest.Check(b, proxiertest.Sync(b.Context(), p))
}

// announce tells a Provider of all Services.
func (r *road) announce(p *proxier.Proxier) {
	for i, s := range r.services {
		name := fmt.Sprintf("s%d", i)
		options := []proxiertest.ServiceOption{proxiertest.ClusterIPs(s.clusterIP.String())}
		if s.isMeasured() {
			options = append(options, proxiertest.LoadBalancer(s.loadBalancer.String()))
		}
		slice := []proxiertest.SliceOption{}
		for _, protocol := range s.protocols() {
			protocol := v1.Protocol(strings.ToUpper(protocol))
			options = append(options, proxiertest.Port(string(protocol), protocol, servicePort))
			slice = append(slice, proxiertest.SlicePort(string(protocol), protocol, endpointPort))
		}
		for _, endpoint := range r.endpoints {
			slice = append(slice, proxiertest.Endpoint(endpoint.Addr().String(), proxiertest.OnNode("node")))
		}
		object := proxiertest.Service("default", name, options...)
		if s.isMeasured() {
			for i := range object.Spec.Ports {
				object.Spec.Ports[i].NodePort = nodePort
			}
		}
		p.OnServiceAdd(object)
		p.OnEndpointSliceAdd(proxiertest.Slice("default", name, discovery.AddressTypeIPv4, slice...))
	}
}

// trackOnly has the node track connections, and nothing else.
func trackOnly(b *testing.B, r *road) {
	b.Helper()
	feed(b, r.world.Node, "table ip track { chain forward { type filter hook forward priority 0; ct state invalid drop; }; }", "nft", "-f", "-")
}

func throughNFTables(b *testing.B, r *road) {
	b.Helper()
	p, err := nftables.New(nftables.Config{Config: r.config()}, proxier.Deps{})
	r.run(b, p, err)
}

// throughSockets has the rules of nftables too, so that the node tracks connections.
func throughSockets(b *testing.B, r *road) {
	b.Helper()
	engine, p := r.sockets(b)
	r.run(b, p, nil)
	inCgroup := r.during
	r.during = func(measure func()) {
		inCgroup(measure)
		if counts, err := engine.SocketCounts(); err != nil || counts.Translated == 0 {
			b.Errorf("%+v, %v: want translated sockets", counts, err)
		}
	}
}

// throughSocketsAlone has no rules any more, so that the node tracks nothing. What is pinned works
// on without its process.
func throughSocketsAlone(b *testing.B, r *road) {
	b.Helper()
	_, p := r.sockets(b)
	r.announce(p)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, stop := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	err := p.Sync(ctx)
	stop()
	netnstest.Check(b, errors.Join(err, <-ended))
	feed(b, r.world.Node, "flush ruleset", "nft", "-f", "-")
}

// sockets translates the sockets of a cgroup of its own, in which this process is while the road is
// measured: no program runs for the other roads.
func (r *road) sockets(b *testing.B) (*ebpf.Engine, *proxier.Proxier) {
	b.Helper()
	home, cgroup := bpftest.OwnCgroup(b), bpftest.NewCgroup(b)
	move := func(to string) {
		netnstest.Check(b, os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0o600))
	}
	r.during = func(measure func()) {
		move(cgroup)
		defer move(home)
		measure()
	}
	config := ebpf.Config{Config: nftables.Config{Config: r.config()}, Sockets: ebpf.Sockets{BPFFS: bpftest.FileSystem(b), Cgroups: []string{cgroup}}}
	engine, err := ebpf.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(b, err)
	p, err := proxier.New(config.Config.Config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	netnstest.Check(b, err)
	return engine, p
}

func throughIPTables(variant iptables.Variant) func(*testing.B, *road) {
	return func(b *testing.B, r *road) {
		b.Helper()
		p, err := iptables.New(iptables.Config{Config: r.config(), Variant: variant}, proxier.Deps{})
		r.run(b, p, err)
	}
}

// throughUserspace has portals of nftables.
func throughUserspace(b *testing.B, r *road) {
	b.Helper()
	config := r.config()
	p, err := userspace.New(userspace.Config{Config: config, Portals: func(family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{Config: config}, family, proxier.Deps{})
	}}, proxier.Deps{})
	r.run(b, p, err)
}

// measure adds one value to each figure.
func (r *road) measure(b *testing.B, effort int) {
	b.Helper()
	add := func(unit string, value float64) { r.figures[unit] = append(r.figures[unit], value) }
	milliseconds := func(unit string, d time.Duration) { add(unit+"-ms", float64(d)/float64(time.Millisecond)) }
	s, pod := r.services[len(r.services)/2], r.world.LocalPods[2]
	clusterIP := netip.AddrPortFrom(s.clusterIP, servicePort)
	to := func(target netip.AddrPort) netip.AddrPort {
		if r.direct {
			return r.endpoints[0]
		}
		return target
	}
	clients := map[*proxiertest.Host]map[string]netip.AddrPort{pod: {"connect": clusterIP}}
	if !r.podsTCP {
		clients[r.world.Client] = map[string]netip.AddrPort{
			"connect-node-port": netip.AddrPortFrom(nodeAddr(r), nodePort), "connect-load-balancer": netip.AddrPortFrom(s.loadBalancer, servicePort),
		}
	}
	for from, targets := range clients {
		for what, target := range targets {
			netnstest.Check(b, from.Do(func() error {
				all, err := connects(to(target), 4*effort)
				if err != nil {
					return fmt.Errorf("%s of %s: %w", what, r.name, err)
				}
				milliseconds(what, at(0.5, all))
				if from == pod {
					milliseconds(what+"-p99", at(0.99, all))
				}
				return nil
			}))
		}
	}
	poll.Nil(b, "the proxy has ended these connections", func() error {
		return pod.Do(func() error {
			fd, err := open(unix.SOCK_STREAM, to(clusterIP))
			if err == nil {
				err = unix.Close(fd)
			}
			return err
		})
	})
	netnstest.Check(b, pod.Do(func() error {
		target, during := to(clusterIP), time.Duration(effort)*time.Millisecond
		rr, err := requests(unix.SOCK_STREAM, target, 10*effort)
		if err != nil {
			return fmt.Errorf("requests over TCP through %s: %w", r.name, err)
		}
		milliseconds("rr", rr)
		crr, err := connectRequests(target, 2*effort)
		if err != nil {
			return fmt.Errorf("connections with a request through %s: %w", r.name, err)
		}
		milliseconds("crr", crr)
		pieces, err := rate(unix.SOCK_STREAM, target, longest, during)
		if err != nil {
			return fmt.Errorf("throughput of %s: %w", r.name, err)
		}
		add("MB/s", pieces*longest/1e6)
		if r.podsTCP {
			return nil
		}
		udp, err := requests(unix.SOCK_DGRAM, target, 10*effort)
		if err != nil {
			return fmt.Errorf("requests over UDP through %s: %w", r.name, err)
		}
		milliseconds("udp", udp)
		datagrams, err := rate(unix.SOCK_DGRAM, target, 64, during)
		if err != nil {
			return fmt.Errorf("datagrams through %s: %w", r.name, err)
		}
		add("packet/s", datagrams)
		first, err := firstPackets(pod.Addr(v1.IPv4Protocol), target, r.flows, 4*effort)
		if err != nil {
			return fmt.Errorf("first packets through %s: %w", r.name, err)
		}
		r.flows += 4 * effort
		milliseconds("first", first)
		return nil
	}))
}
