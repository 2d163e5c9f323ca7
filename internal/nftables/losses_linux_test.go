package nftables

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// changing is a service port of which endpoints come and go. It has many frontends of one kind.
func (w *world) changing(n int, change func(s *desired.Service, f *desired.Frontend)) *desired.Service {
	const frontends = 10
	s := &desired.Service{Name: name(n), Protocol: desired.UDP, Port: &changetracker.ServicePort{Balancing: changetracker.Random}}
	for i := range 1 + w.rand.IntN(6) {
		s.Cluster = s.Cluster.With(netip.AddrPortFrom(w.addr(244, 256*n+10*i+w.rand.IntN(10)), 8080))
	}
	s.Local = s.Cluster
	for i := range frontends {
		f := desired.Frontend{
			Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: uint16(1000 + 100*n + i), Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNone,
		}
		change(s, &f)
		w.add(s, f)
	}
	slices.SortFunc(s.Frontends, func(a, b desired.Frontend) int { return s.Key(&a).Compare(s.Key(&b)) })
	return s
}

// TestNoConnectionIsLostDuringAChange: every first packet, at any moment of the changes of its
// service port's endpoints, is translated to an endpoint. Until Linux 6.17 a lookup may miss an
// element that a transaction replaces, and a packet on its way sees old rules and new elements.
func TestNoConnectionIsLostDuringAChange(t *testing.T) {
	const rounds, sockets = 10, 200 // so many connections fit into the conntrack table of a small machine
	bothFamilies(t, func(t *testing.T, w *world) {
		c := newCounted(t, w)
		everybody := []netip.Prefix{netip.PrefixFrom(w.addr(0, 0), 8).Masked()}
		kinds := []func(s *desired.Service, f *desired.Frontend){
			func(*desired.Service, *desired.Frontend) {},
			func(s *desired.Service, _ *desired.Frontend) { s.Affinity = time.Hour },
			func(_ *desired.Service, f *desired.Frontend) { f.Kind, f.VIP = desired.NodePort, netip.Addr{} },
			func(s *desired.Service, f *desired.Frontend) {
				f.Kind, f.VIP, f.Restricted, f.SourceRanges = desired.LoadBalancer, w.addr(200, 0), true, everybody
			},
			func(s *desired.Service, f *desired.Frontend) {
				f.Kind, f.VIP, f.Scope, f.ShortCircuit = desired.ExternalIP, w.addr(201, 0), desired.ScopeLocal, true
			},
			func(s *desired.Service, f *desired.Frontend) {
				f.Kind, f.VIP, f.Scope = desired.NodePort, netip.Addr{}, desired.ScopeLocal
				s.Affinity, f.ShortCircuit = time.Hour, true
			},
		}
		m := model{}
		changes := func() (list []desired.Change) {
			for n, kind := range kinds {
				s := w.changing(n, kind)
				m[s.Name] = s
				list = append(list, desired.Change{Name: s.Name, After: s})
			}
			return list
		}
		changes()
		mustApply(t, c.Engine, m.full(w))
		var targets []netip.AddrPort
		for _, s := range m {
			for i := range s.Frontends {
				to := netip.AddrPortFrom(s.Frontends[i].VIP, s.Frontends[i].Port)
				if !to.Addr().IsValid() {
					to = netip.AddrPortFrom(c.addr, to.Port())
				}
				targets = append(targets, to)
			}
		}
		slices.SortFunc(targets, netip.AddrPort.Compare)

		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			defer stop()
			for round := range rounds {
				c.sendAll(targets, 10_000+uint16(round*sockets), sockets)
				if err := c.node.Do(func() error { return c.judge(sockets * len(targets)) }); err != nil {
					t.Errorf("round %d: %v", round, err)
				}
			}
		})
		applied := 0
		for ; ctx.Err() == nil; applied++ {
			mustApply(t, c.Engine, desired.Update{Family: w.family, Globals: w.globals(), Changes: changes()})
		}
		running.Wait()
		t.Logf("%d changes", applied)
	})
}

// sendAll sends a datagram from each of the ports to each target.
func (c *counted) sendAll(targets []netip.AddrPort, from uint16, sockets int) {
	for i := range sockets {
		addr := netip.AddrPortFrom(c.addr, from+uint16(i))
		socket, err := c.node.ListenPacket(c.t.Context(), "udp", addr.String())
		if err != nil {
			c.t.Error(err)
			return
		}
		for _, to := range targets {
			if _, err := socket.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(to)); err != nil {
				c.t.Errorf("from %v: %v", addr, err)
			}
		}
		if err := socket.Close(); err != nil {
			c.t.Error(err)
		}
	}
}

// judge compares the conntrack entries with the number of datagrams, and deletes them.
func (c *counted) judge(want int) error {
	list, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.InetFamily(either(c.w.family == v1.IPv4Protocol, unix.AF_INET, unix.AF_INET6)))
	if err != nil {
		return err
	}
	flows, pods := 0, c.w.globals().PodCIDRs[0]
	for _, f := range list {
		if f.Forward.Protocol != unix.IPPROTO_UDP {
			continue
		}
		flows++
		if to, _ := netip.AddrFromSlice(f.Reverse.SrcIP); !pods.Contains(to.Unmap()) {
			err = errors.Join(err, fmt.Errorf("no endpoint for %v", f))
		}
	}
	if flows != want {
		err = errors.Join(err, fmt.Errorf("%d connections, want %d", flows, want))
	}
	return errors.Join(err, netlink.ConntrackTableFlush(netlink.ConntrackTable))
}
