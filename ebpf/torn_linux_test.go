package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

var tornConnects = flag.Int("torn.connects", 10_000, "how many sockets of each IP family connect while endpoints are replaced, at least")

// tornServices are replaced in turn.
const tornServices = 8

// versions is a Service whose endpoints are replaced again and again. The address of each tells the
// Service and the version.
type versions struct {
	service     int
	family      v1.IPFamily
	begun, done atomic.Uint32
}

func (v *versions) vip() netip.AddrPort {
	a := [4]byte{172, 16, 0, byte(v.service)}
	if v.family == v1.IPv4Protocol {
		return netip.AddrPortFrom(netip.AddrFrom4(a), 80)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(v.service)}), 80)
}

// endpoint has three bytes: which Service, which of its endpoints, and the last 16 bits of the version.
func (v *versions) endpoint(number int, version uint32) netip.AddrPort {
	tail := binary.BigEndian.AppendUint16([]byte{byte(v.service<<5 | number)}, uint16(version))
	if v.family == v1.IPv4Protocol {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, tail[0], tail[1], tail[2]}), 8080)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 1, 13: tail[0], 14: tail[1], 15: tail[2]}), 8080)
}

// next returns the next version, whose number of endpoints differs.
func (v *versions) next() (name changetracker.ServicePortName, c *carried) {
	version := v.begun.Add(1)
	var all []netip.AddrPort
	for number := range 1 + int(version*7%31) {
		all = append(all, v.endpoint(number, version))
	}
	c = &carried{frontends: map[desired.Key]int{{VIP: v.vip().Addr(), Port: v.vip().Port(), Protocol: desired.TCP}: 0}}
	c.endpoints[0] = desired.EndpointsOf(all...)
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Name: fmt.Sprint(v.service)}, Protocol: v1.ProtocolTCP}, c
}

// check says what is wrong with the endpoint that a socket got, which began to connect when a version was
// published.
func (v *versions) check(peer netip.AddrPort, published uint32) error {
	latest := v.begun.Load()
	bytes := peer.Addr().AsSlice()
	version := uint32(binary.BigEndian.Uint16(bytes[len(bytes)-2:]))
	number := int(bytes[len(bytes)-3] & 31)
	age := (version - published) & 0xffff
	full := published + age
	if peer != v.endpoint(number, version) || latest-published < 1<<16 && (age > latest-published || number >= 1+int(full*7%31)) {
		return fmt.Errorf("%v leads to %v: not an endpoint of versions %d to %d", v.vip(), peer, published, latest)
	}
	return nil
}

// TestNoStateIsTorn: each socket gets an endpoint of a version that was the current one while it
// connected, however often endpoints are replaced meanwhile. With 300,000 sockets the test finds an
// engine that overwrites endpoints in place.
func TestNoStateIsTorn(t *testing.T) {
	t.Parallel()
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel()
			ns := netnstest.New(t)
			serveEverywhere(t, ns, family)
			sockets := Sockets{BPFFS: bpftest.FileSystem(t), Cgroups: []string{bpftest.OwnCgroup(t)}, Namespaces: &Namespaces{Only: true}, RealPeer: true}
			netnstest.Check(t, sockets.Namespaces.Add(ns.Path()))
			e, err := NewEngine(Config{Config: nftables.Config{Config: proxier.Config{NetNS: ns.Path()}}, Sockets: sockets}, family, proxier.Deps{})
			netnstest.Check(t, err)
			_, err = e.Apply(t.Context(), desired.Update{Family: family, Full: true})
			netnstest.Check(t, err)
			e.mu.Lock() // nobody else calls it
			// Small maps would wait for the kernel before each publication.
			netnstest.Check(t, e.layer.rewrite(nil, capacity{frontends: 64, services: 64, endpoints: 1 << 16}))
			var all [tornServices]*versions
			for i := range all {
				all[i] = &versions{service: i, family: family}
				netnstest.Check(t, all[i].publish(e))
			}
			ctx, stop := context.WithCancel(t.Context())
			var client sync.WaitGroup
			client.Go(func() {
				defer stop()
				netnstest.Check(t, ns.Do(func() error { return connectAll(t.Context(), &all) }))
			})
			published := 0
			for ; ctx.Err() == nil; published++ {
				if err := all[published%tornServices].publish(e); err != nil {
					t.Errorf("publication %d: %v", published, err)
					break
				}
			}
			client.Wait()
			e.mu.Unlock()
			counts, err := e.SocketCounts()
			netnstest.Check(t, err)
			if counts.Translated < uint64(*tornConnects) || counts.Empty > 0 {
				t.Errorf("counts %+v, want %d translated, and none that found no endpoint", counts, *tornConnects)
			}
			t.Logf("%d sockets connected during %d publications", counts.Translated, published)
			netnstest.Check(t, errors.Join(e.Cleanup(t.Context()), e.Close()))
		})
	}
}

func (v *versions) publish(e *Engine) error {
	name, c := v.next()
	err := errors.Join(e.publish(name, c), e.layer.free(false))
	v.done.Store(v.begun.Load())
	for _, refused := range e.limited {
		err = errors.Join(err, refused)
	}
	return err
}

// connectAll connects to the Services in turn.
func connectAll(ctx context.Context, all *[tornServices]*versions) error {
	for n := range *tornConnects {
		v := all[n%tornServices]
		published := v.done.Load()
		peer, err := connectOnce(v.vip())
		if err != nil {
			return fmt.Errorf("connect to %v: %w", v.vip(), err)
		}
		if err := errors.Join(ctx.Err(), v.check(peer, published)); err != nil {
			return err
		}
	}
	return nil
}

// connectOnce returns the endpoint that a socket got.
func connectOnce(to netip.AddrPort) (peer netip.AddrPort, err error) {
	family, sa := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(to.Port()), Addr: [4]byte(to.Addr().AsSlice())})
	if to.Addr().Is6() {
		family, sa = unix.AF_INET6, &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return peer, err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	// It ends with a reset, and its port is free again.
	if err := errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}), unix.Connect(fd, sa)); err != nil {
		return peer, err
	}
	name, err := unix.Getpeername(fd)
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), err
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), err
	}
	return peer, err
}

// serveEverywhere accepts connections to all endpoints.
func serveEverywhere(t *testing.T, ns *netns.NS, family v1.IPFamily) {
	t.Helper()
	local := netip.MustParsePrefix("10.0.0.0/8")
	if family == v1.IPv6Protocol {
		local = netip.MustParsePrefix("fd01::/16")
	}
	netnstest.Check(t, ns.AddRange(local))
	l, err := ns.Listen(t.Context(), "tcp", ":8080")
	netnstest.Check(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { netnstest.Check(t, l.Close()); <-ended })
}
