package refusals

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// losing is a node with an engine that translates, and with service ports of which endpoints come
// and go.
type losing struct {
	t      *testing.T
	node   *netns.NS
	family v1.IPFamily
	engine proxier.Engine
	// drops means that the engine drops a packet which meets one change after the other: a client
	// sends it again.
	drops   bool
	dropped int
}

// dropsInARow is how often a client sends a datagram again, at most.
const dropsInARow = 5

// addr returns an address of the nth host of a network.
func (l *losing) addr(network, n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf([]string{"10.%d.%d.%d", "fd00:%x::%x:%x"}[index(l.family)], network, n>>8, n&0xff))
}

// network returns the addresses of a network.
func (l *losing) network(n int) netip.Prefix {
	return netip.PrefixFrom(l.addr(n, 0), []int{16, 32}[index(l.family)])
}

const (
	losingNode, losingPods, losingVIPs = 5, 244, 96
	losingKinds                        = 6
)

// draw returns a service port of a kind, with many frontends and some endpoints.
func (l *losing) draw(kind int) *desired.Service {
	const frontends = 10
	s := &desired.Service{
		Name: changetracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "losses", Name: name(kind)}, Port: "web", Protocol: v1.ProtocolUDP,
		},
		Protocol: desired.UDP, Port: &changetracker.ServicePort{},
	}
	for i := range 1 + rand.IntN(6) {
		s.Cluster = s.Cluster.With(netip.AddrPortFrom(l.addr(losingPods, 256*kind+10*i+rand.IntN(10)), 8080))
	}
	s.Local = s.Cluster
	f := desired.Frontend{VIP: l.addr(losingVIPs, kind), Action: desired.Forward, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNone}
	switch kind {
	case 1:
		s.Affinity = time.Hour
	case 2:
		f.Kind, f.VIP = desired.NodePort, netip.Addr{}
	case 3:
		f.Kind, f.Restricted, f.SourceRanges = desired.LoadBalancer, true, []netip.Prefix{l.network(losingNode)}
	case 4:
		f.Kind, f.Scope, f.ShortCircuit = desired.ExternalIP, desired.ScopeLocal, true
	case 5:
		f.Kind, f.VIP, f.Scope, f.ShortCircuit = desired.NodePort, netip.Addr{}, desired.ScopeLocal, true
		s.Affinity = time.Hour
	}
	for i := range frontends {
		f.Port = uint16(1000 + 100*kind + i)
		s.Frontends = append(s.Frontends, f)
	}
	return s
}

// update draws all service ports again.
func (l *losing) update(full bool) desired.Update {
	u := desired.Update{Family: l.family, Full: full, Globals: desired.Globals{
		NodePortAddresses: []netip.Prefix{l.network(losingNode)}, PodCIDRs: []netip.Prefix{l.network(losingPods)},
	}}
	for kind := range losingKinds {
		u.Changes = append(u.Changes, desired.ChangesTo(l.draw(kind))...)
	}
	return u
}

func (l *losing) apply(u desired.Update) {
	l.t.Helper()
	r, err := l.engine.Apply(l.t.Context(), u)
	if err != nil || len(r.Failed) > 0 {
		l.t.Fatalf("apply: %v, %v", err, r.Failed)
	}
}

// targets are the addresses and ports of all frontends.
func (l *losing) targets() (all []*net.UDPAddr) {
	for kind := range losingKinds {
		for _, f := range l.draw(kind).Frontends {
			vip := f.VIP
			if !vip.IsValid() {
				vip = l.addr(losingNode, 1)
			}
			all = append(all, net.UDPAddrFromAddrPort(netip.AddrPortFrom(vip, f.Port)))
		}
	}
	return all
}

// TestNoConnectionIsLostDuringAChange: every first packet, at any moment of the changes of its
// service port's endpoints, is translated to an endpoint. It is for engines whose rules translate.
// nftables may drop one, and the node's own client learns that: none leaves without translation.
func TestNoConnectionIsLostDuringAChange(t *testing.T) {
	for title, create := range map[string]func(proxier.Config, v1.IPFamily) (proxier.Engine, error){
		"nftables": func(c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
			return nftables.NewEngine(nftables.Config{Config: c}, family, proxier.Deps{})
		},
		"iptables-nft": func(c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
			return iptables.NewEngine(iptables.Config{Config: c, Variant: iptables.VariantNFT}, family, proxier.Deps{})
		},
		"iptables-legacy": func(c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
			return iptables.NewEngine(iptables.Config{Config: c, Variant: iptables.VariantLegacy}, family, proxier.Deps{})
		},
	} {
		for _, family := range chance.Some(t, 1, families()...) {
			t.Run(fmt.Sprintf("%s/%s", title, family), func(t *testing.T) {
				l := &losing{t: t, node: netnstest.New(t), family: family, drops: title == "nftables"}
				var err error
				l.engine, err = create(proxier.Config{NetNS: l.node.Path()}, family)
				netnstest.Check(t, err)
				t.Cleanup(func() { netnstest.Check(t, l.engine.Close()) })
				l.run()
			})
		}
	}
}

func (l *losing) run() {
	l.t.Helper()
	const sockets = 200 // so many connections fit into the conntrack table of a small machine
	rounds := chance.Few(4, 10)
	peer := netnstest.New(l.t)
	at := func(n int) []string {
		return []string{netip.PrefixFrom(l.addr(losingNode, n), l.network(losingNode).Bits()).String()}
	}
	netnstest.Connect(l.t, l.node, at(1), peer, at(2))
	for _, n := range []int{losingPods, losingVIPs} {
		netnstest.Check(l.t, l.node.AddRoute(l.network(n), l.addr(losingNode, 2)))
	}
	l.apply(l.update(true))
	targets := l.targets()
	ctx, stop := context.WithCancel(l.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		defer stop()
		for round := range rounds {
			for i := range sockets {
				if err := l.send(uint16(10_000+round*sockets+i), targets); err != nil {
					l.t.Error(err)
				}
			}
			if err := l.node.Do(func() error { return l.judge(sockets * len(targets)) }); err != nil {
				l.t.Errorf("round %d: %v", round, err)
			}
		}
	})
	applied := 0
	for ; ctx.Err() == nil; applied++ {
		l.apply(l.update(false))
	}
	running.Wait()
	l.t.Logf("%d changes, %d datagrams sent again", applied, l.dropped)
}

// send sends a datagram from a port to each target.
func (l *losing) send(port uint16, targets []*net.UDPAddr) error {
	from := netip.AddrPortFrom(l.addr(losingNode, 1), port)
	socket, err := l.node.ListenPacket(l.t.Context(), "udp", from.String())
	if err != nil {
		return err
	}
	for _, to := range targets {
		_, sent := socket.WriteTo([]byte("x"), to)
		for n := 0; l.drops && errors.Is(sent, unix.EPERM) && n < dropsInARow; n++ {
			l.dropped++
			_, sent = socket.WriteTo([]byte("x"), to)
		}
		err = errors.Join(err, sent)
	}
	return errors.Join(err, socket.Close())
}

// judge compares the conntrack entries with the number of datagrams, and deletes them.
func (l *losing) judge(want int) error {
	list, err := netlink.ConntrackTableList(netlink.ConntrackTable, []netlink.InetFamily{unix.AF_INET, unix.AF_INET6}[index(l.family)])
	if err != nil {
		return err
	}
	flows := 0
	for _, f := range list {
		if f.Forward.Protocol != unix.IPPROTO_UDP {
			continue
		}
		flows++
		if to, _ := netip.AddrFromSlice(f.Reverse.SrcIP); !l.network(losingPods).Contains(to.Unmap()) {
			err = errors.Join(err, fmt.Errorf("no endpoint for %v", f))
		}
	}
	if flows != want {
		err = errors.Join(err, fmt.Errorf("%d connections, want %d", flows, want))
	}
	return errors.Join(err, netlink.ConntrackTableFlush(netlink.ConntrackTable))
}
