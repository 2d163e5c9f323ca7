package iptables

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// countedNode is a node whose engine counts connections. The addresses of endpoints are behind a
// peer, which does not answer.
type countedNode struct {
	*engine

	b        *bench
	lockFile string
	source   uint32 // of the last datagram: its address and port
	sent     map[string]uint64
}

func newCountedNode(tb testing.TB, variant Variant, names proxier.Names, services int) *countedNode {
	tb.Helper()
	c := &countedNode{
		b:        &bench{variant: variant, names: names, services: newServices(services, 3), ns: netnstest.New(tb)},
		lockFile: filepath.Join(tb.TempDir(), "lock"), sent: map[string]uint64{},
	}
	for _, s := range c.b.services {
		s.Protocol, s.Name.Protocol = desired.UDP, v1.ProtocolUDP
	}
	peer := netnstest.New(tb)
	netnstest.Connect(tb, c.b.ns, []string{"192.0.2.1/24"}, peer, []string{"192.0.2.2/24"})
	netnstest.Check(tb, c.b.ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("192.0.2.2")))
	config := c.b.config(c.b.ns)
	config.CountConnections = true
	e, err := newEngine(config, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(tb, err)
	e.open = func(ctx context.Context) (kernel, error) {
		t := e.toolConfig(variant)
		t.lockFile = c.lockFile
		return openTool(ctx, t)
	}
	tb.Cleanup(func() { netnstest.Check(tb, e.Close()) })
	c.engine = e
	return c
}

// connect sends first packets of n connections to a Service.
func (c *countedNode) connect(tb testing.TB, s *desired.Service, n int) {
	tb.Helper()
	netnstest.Check(tb, c.b.ns.Do(func() error {
		for range n {
			c.source++
			from := &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1), Port: int(1024 + c.source%60_000)}
			socket, err := net.DialUDP("udp4", from, net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.Frontends[0].VIP, 80)))
			if err != nil {
				return err
			}
			_, err = socket.Write([]byte("x"))
			if closeErr := socket.Close(); err != nil || closeErr != nil {
				return fmt.Errorf("send: %w, %w", err, closeErr)
			}
			c.sent[s.Name.Name]++
		}
		return nil
	}))
}

// counted returns the numbers, and fails if one has fallen.
func (c *countedNode) counted(tb testing.TB, last map[string]uint64) map[string]uint64 {
	tb.Helper()
	got, err := c.Counts(tb.Context())
	netnstest.Check(tb, err)
	now := map[string]uint64{}
	for _, p := range got.ServicePorts {
		now[p.Name.Name] = p.Connections
	}
	for name, n := range last {
		if now[name] < n {
			tb.Errorf("%s falls from %d to %d", name, n, now[name])
		}
	}
	return now
}

func eachCountedNode(t *testing.T, test func(t *testing.T, c *countedNode)) {
	t.Helper()
	for _, variant := range variants(t) {
		for _, names := range []proxier.Names{proxier.DefaultNames(), proxier.KubeProxyNames()} {
			t.Run(string(variant)+"/"+names.Instance, func(t *testing.T) {
				t.Parallel()
				test(t, newCountedNode(t, variant, names, 5))
			})
		}
	}
}

// Connections, readings, syncs that replace endpoints, and other programs that write the same table run all at
// once. No number falls, and none is too large. The nft variant loses nothing; the legacy variant loses some, at
// most while it writes.
func TestCountsBesideWrites(t *testing.T) {
	t.Parallel()
	eachCountedNode(t, func(t *testing.T, c *countedNode) {
		c.b.apply(t, c.engine, c.b.fullUpdate())
		const rounds, each = 12, 60
		var sending, others sync.WaitGroup
		ctx, stop := context.WithCancel(t.Context())
		sending.Go(func() {
			for i := range rounds * each {
				c.connect(t, c.b.services[i%len(c.b.services)], 1)
			}
		})
		others.Go(func() {
			for last := map[string]uint64{}; ctx.Err() == nil; {
				last = c.counted(t, last)
			}
		})
		others.Go(func() {
			for ctx.Err() == nil {
				c.runOther(t, "-t", "nat", "-A", "POSTROUTING", "-j", "RETURN")
				c.runOther(t, "-t", "nat", "-D", "POSTROUTING", "-j", "RETURN")
			}
		})
		for i := range rounds {
			u := c.b.update([]*desired.Service{replaced(c.b.services[i%len(c.b.services)], i)})
			if i%6 == 5 {
				u.Full = true
				u.Changes = append(u.Changes, desired.ChangesTo(others5(c.b.services, i%len(c.b.services))...)...)
			}
			c.b.apply(t, c.engine, u)
		}
		sending.Wait()
		stop()
		others.Wait()
		lost := uint64(0)
		for name, n := range c.counted(t, nil) {
			if n > c.sent[name] {
				t.Errorf("%s has %d connections, want %d", name, n, c.sent[name])
			}
			lost += c.sent[name] - n
		}
		if t.Logf("%d of %d connections lost", lost, rounds*each); c.b.variant == VariantNFT && lost > 0 {
			t.Errorf("%d connections lost, want none", lost)
		}
	})
}

// others5 are all Services but one.
func others5(all []*desired.Service, but int) (rest []*desired.Service) {
	for i, s := range all {
		if i != but {
			rest = append(rest, s)
		}
	}
	return rest
}

// runOther runs iptables as another program would.
func (c *countedNode) runOther(tb testing.TB, args ...string) {
	tb.Helper()
	netnstest.Check(tb, c.b.ns.Do(func() error {
		cmd := exec.Command("iptables-"+string(c.b.variant), append([]string{"-w"}, args...)...)
		cmd.Env = append(cmd.Environ(), "XTABLES_LOCKFILE="+c.lockFile)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("iptables %v: %w: %s", args, err, out)
		}
		return nil
	}))
}

// Counts survive damage by another program, which deletes rules and chains. With the nft variant nothing is lost,
// with the legacy variant what was not read before.
func TestCountsAfterDamage(t *testing.T) {
	t.Parallel()
	eachCountedNode(t, func(t *testing.T, c *countedNode) {
		c.b.apply(t, c.engine, c.b.fullUpdate())
		s := c.b.services[0]
		c.connect(t, s, 20)
		if c.b.variant == VariantLegacy {
			c.counted(t, nil)
		}
		c.runOther(t, "-t", "nat", "-F")
		c.b.apply(t, c.engine, c.b.fullUpdate())
		c.connect(t, s, 9)
		if got := c.counted(t, nil)[s.Name.Name]; got != 29 {
			t.Errorf("%d connections, want 29", got)
		}
	})
}

// TestALockedTableIsReadAgain: where counters have fallen, another program may be between replacing
// the table and adding the old counters, with the lock.
func TestALockedTableIsReadAgain(t *testing.T) {
	t.Parallel()
	c := newCountedNode(t, VariantLegacy, proxier.DefaultNames(), 1)
	c.config.LockWait = time.Minute
	c.b.apply(t, c.engine, c.b.fullUpdate())
	c.connect(t, c.b.services[0], 4)
	lock, err := unix.Open(c.lockFile, unix.O_RDONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	netnstest.Check(t, err)
	netnstest.Check(t, unix.Flock(lock, unix.LOCK_EX))
	w := c.guard.watcher.(*legacyWatcher)
	read := make(chan counterValues, 1)
	asked := make(chan struct{}, 1)
	go func() {
		values, err := w.counters(t.Context(), func(counterKey) uint64 {
			select {
			case asked <- struct{}{}:
			default:
			}
			return 1 << 40 // so each has fallen
		})
		if err != nil {
			t.Errorf("counters: %v", err)
		}
		read <- values
	}()
	<-asked
	select {
	case <-read:
		t.Error("the table is read again although another program has the lock")
	default:
	}
	netnstest.Check(t, unix.Close(lock))
	sum := uint64(0)
	for _, n := range <-read {
		sum += n
	}
	if sum != 4 {
		t.Errorf("%d connections, want 4", sum)
	}
}
