package chaos

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const (
	namespace = "chaos"
	nodeName  = "node"
	// clientAddrs is how many addresses a host uses at most.
	clientAddrs = 8
	podPort     = 8080
)

// world is a node with its network, Services and clients.
type world struct {
	*proxiertest.Topology

	t       *testing.T
	api     *apitest.Server
	config  string // kubeconfig
	clients clients
	web     *service
	sticky  *service
	marker  *service
	marked  int // which endpoint the marker has
}

// service is a Service with TCP and UDP at the same port of all its addresses.
type service struct {
	name   string
	number byte
	sticky bool
}

func newWorld(t *testing.T, e engine) *world {
	t.Helper()
	w := &world{
		t: t, Topology: proxiertest.NewTopology(t), clients: clients{lossy: e.lossy, ports: map[kind]*atomic.Uint32{}},
		web: &service{"web", 1, false}, sticky: &service{"sticky", 2, true}, marker: &service{"marker", 3, false},
	}
	netnstest.ForgetSoon(t, w.Node, 20*time.Second)
	for _, host := range []*proxiertest.Host{w.Node, w.Client, w.LocalPods[0], w.LocalPods[1]} {
		netnstest.Check(t, host.Do(func() error { // thousands of connections a second to one address need each port soon again
			return os.WriteFile("/proc/sys/net/ipv4/tcp_tw_reuse", []byte("1"), 0)
		}))
		w.clients.add(host, w.web)
		w.clients.add(host, w.sticky)
	}
	w.serveAPI()
	for _, s := range []*service{w.web, w.sticky, w.marker} {
		w.api.Put(t, s.object())
	}
	w.api.Put(t, w.node())
	w.put(w.web, w.pods()...)
	w.put(w.sticky, w.pods()...)
	for n := range *services {
		s := &service{fmt.Sprintf("other-%d", n), byte(10 + n), n%2 == 0}
		w.api.Put(t, s.object())
		w.put(s, w.pods()...)
	}
	w.mark()
	return w
}

// pods are the endpoints that always stay.
func (w *world) pods() []*proxiertest.Host {
	return []*proxiertest.Host{w.LocalPods[1], w.LocalPods[2], w.RemotePods[0], w.RemotePods[1]}
}

// morePods are endpoints that come and go.
func (w *world) morePods() []*proxiertest.Host {
	return []*proxiertest.Host{w.LocalPods[0], w.RemotePods[2]}
}

// serveAPI starts an API server on the node.
func (w *world) serveAPI() {
	w.t.Helper()
	address := "127.0.0.1:0"
	listen := func() (l net.Listener, err error) {
		poll.Soon(func() bool { // the address may be in use for a moment
			err = w.Node.Do(func() (err error) { l, err = new(net.ListenConfig).Listen(w.t.Context(), "tcp", address); return err })
			return err == nil
		})
		return l, err
	}
	first, err := listen()
	netnstest.Check(w.t, err)
	address = first.Addr().String()
	w.api = apitest.New(w.t, apitest.Options{WatchList: true, Listener: first, Listen: listen})
	w.config = w.api.Kubeconfig(w.t)
}

func (w *world) node() *v1.Node {
	config := w.Config()
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: config.Node.Name}}
	for _, addr := range config.Node.Addresses {
		n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: addr.String()})
	}
	for _, prefix := range config.Node.PodCIDRs {
		n.Spec.PodCIDRs = append(n.Spec.PodCIDRs, prefix.String())
	}
	n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	return n
}

// address is one of the addresses of a Service, by a number for its range.
func (s *service) address(prefix byte, family v1.IPFamily) netip.Addr {
	if family == v1.IPv4Protocol {
		if prefix == clusterIPs {
			return netip.AddrFrom4([4]byte{10, 96, 1, s.number})
		}
		return netip.AddrFrom4([4]byte{203, 0, prefix, s.number})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:10:96::%x:%x", prefix, s.number))
}

// Ranges of address.
const clusterIPs, externalIPs, loadBalancerIPs = 96, 114, 115

// nodePort is the node port of a protocol.
func (s *service) nodePort(network string) uint16 {
	if network == "udp" {
		return 31000 + uint16(s.number)
	}
	return 30000 + uint16(s.number)
}

// frontends are where clients of a protocol connect to.
func (s *service) frontends(network string, family v1.IPFamily) (all []netip.AddrPort) {
	for _, prefix := range []byte{clusterIPs, externalIPs, loadBalancerIPs} {
		all = append(all, netip.AddrPortFrom(s.address(prefix, family), 80))
	}
	node := "192.0.2.10"
	if family == v1.IPv6Protocol {
		node = "2001:db8:2::10"
	}
	return append(all, netip.AddrPortFrom(netip.MustParseAddr(node), s.nodePort(network)))
}

func (s *service) object() *v1.Service {
	both := func(prefix byte) []string {
		return []string{s.address(prefix, v1.IPv4Protocol).String(), s.address(prefix, v1.IPv6Protocol).String()}
	}
	options := []proxiertest.ServiceOption{
		proxiertest.ClusterIPs(both(clusterIPs)...),
		proxiertest.NodePort("tcp", v1.ProtocolTCP, 80, int32(s.nodePort("tcp"))),
		proxiertest.NodePort("udp", v1.ProtocolUDP, 80, int32(s.nodePort("udp"))),
		proxiertest.ExternalIPs(both(externalIPs)...),
		proxiertest.LoadBalancer(both(loadBalancerIPs)...),
	}
	if s.sticky {
		options = append(options, proxiertest.ClientAffinity(3*time.Hour))
	}
	return proxiertest.Service(namespace, s.name, options...)
}

// put replaces the endpoints of a Service.
func (w *world) put(s *service, pods ...*proxiertest.Host) {
	w.t.Helper()
	for _, family := range families() {
		slice := proxiertest.Slice(namespace, s.name, discovery.AddressType(family),
			proxiertest.SlicePort("tcp", v1.ProtocolTCP, podPort), proxiertest.SlicePort("udp", v1.ProtocolUDP, podPort))
		for _, pod := range pods {
			at := "another"
			for _, local := range w.LocalPods {
				if local == pod {
					at = nodeName
				}
			}
			proxiertest.Endpoint(pod.Addr(family).String(), proxiertest.OnNode(at))(slice)
		}
		w.api.Put(w.t, slice)
	}
}

// mark gives the marker another endpoint.
func (w *world) mark() {
	w.t.Helper()
	w.marked++
	w.put(w.marker, w.pods()[w.marked%len(w.pods())])
}

// mustFollow waits until the proxy has programmed all changes so far.
func (g *game) mustFollow() {
	w := g.world
	w.t.Helper()
	w.mark()
	want := w.pods()[w.marked%len(w.pods())].Name
	var err error
	follows := func() error {
		for _, family := range families() {
			to := w.marker.frontends("tcp", family)[0]
			answer, err := w.Client.Ask(w.t.Context(), "tcp", to, proxiertest.AskOptions{From: w.Client.Addr(family), Timeout: patience})
			if err != nil {
				return fmt.Errorf("%v: %w", to, err)
			}
			if answer.Server != want {
				return fmt.Errorf("%v: %s answers, want %s", to, answer.Server, want)
			}
		}
		return nil
	}
	if !poll.Soon(func() bool { err = follows(); return err == nil }) {
		w.t.Fatalf("the proxy does not program changes within %v: %v\nthe proxy:\n%s", poll.Timeout, err, tail(g.proxy.log))
	}
}

func families() []v1.IPFamily { return []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} }
