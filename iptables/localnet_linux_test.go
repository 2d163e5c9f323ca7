package iptables

import (
	"context"
	"encoding/binary"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// intruder is a neighbour that sends to 127.0.0.1 of a node all the time.
type intruder struct {
	*world

	sent     atomic.Uint32 // packets; each carries its number, from 1
	received atomic.Uint32 // the greatest number that the node has received
	ruled    uint32        // the greatest number that was sent before the rule existed
}

const settingAll, settingLink = "net/ipv4/conf/all/route_localnet", "net/ipv4/conf/eth0/route_localnet"

func newIntruder(t *testing.T, variant Variant) *intruder {
	t.Helper()
	b := &intruder{world: &world{t, netnstest.New(t), variant, proxier.DefaultNames()}}
	neighbour := netnstest.New(t)
	netnstest.Connect(t, neighbour, []string{"192.0.2.2/24"}, b.ns, []string{"192.0.2.1/24"})
	at, err := b.ns.ListenPacket(t.Context(), "udp", "127.0.0.1:7777")
	netnstest.Check(t, err)
	netnstest.Check(t, neighbour.SetSysctl(settingAll, "1")) // to send them
	b.ns, neighbour = neighbour, b.ns                        // run acts in ns
	b.run("ip", "addr", "del", "127.0.0.1/8", "dev", "lo")
	b.run("ip", "route", "add", "127.0.0.1/32", "via", "192.0.2.1", "src", "192.0.2.2")
	b.ns, neighbour = neighbour, b.ns
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{}, 2)
	go func() {
		defer func() { done <- struct{}{} }()
		buffer := make([]byte, 64)
		for {
			n, from, err := at.ReadFrom(buffer)
			if err != nil {
				return
			}
			if n == 4 && strings.HasPrefix(from.String(), "192.0.2.2:") {
				b.received.Store(max(b.received.Load(), binary.BigEndian.Uint32(buffer)))
			}
		}
	}()
	go func() {
		defer func() { done <- struct{}{} }()
		for ctx.Err() == nil {
			if conn, err := neighbour.DialFrom(ctx, "udp", netip.MustParseAddr("192.0.2.2"), "127.0.0.1:7777"); err == nil { // a new flow
				_, _ = conn.Write(binary.BigEndian.AppendUint32(nil, b.sent.Add(1)))
				_ = conn.Close()
			}
			select { // often enough to hit a gap
			case <-ctx.Done():
			case <-time.After(2 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		_ = at.Close()
		<-done
		<-done
	})
	return b
}

// mustStayOut waits until more packets were sent; none may be received.
func (b *intruder) mustStayOut(after string) {
	b.t.Helper()
	sent := b.sent.Load()
	poll.Until(b.t, "the neighbour sends more packets", func() bool { return b.sent.Load() > sent+20 })
	if n := b.received.Load(); n > b.ruled {
		b.t.Fatalf("%s: packet %d for 127.0.0.1 received, want none after packet %d", after, n, b.ruled)
	}
}

// mustComeIn waits until a packet is received.
func (b *intruder) mustComeIn() {
	b.t.Helper()
	sent := b.sent.Load()
	poll.Until(b.t, "the node receives a packet", func() bool { return b.received.Load() > sent })
}

func (b *intruder) setting(want string) {
	b.t.Helper()
	got, err := b.ns.Sysctl(settingAll)
	netnstest.Check(b.t, err)
	if got != want {
		b.t.Errorf("route_localnet = %s, want %s", got, want)
	}
}

// Other hosts reach no loopback address while node ports are accepted there, when that ends in any way, and
// afterwards. What an administrator has set for one interface opens that again.
func TestOtherHostsNeverReachLoopbackAddresses(t *testing.T) {
	away := func(c *Config) { c.RouteLocalnet = false }
	cleanup := func(b *intruder, p *proxier.Proxier) {
		b.t.Helper()
		if err := p.Cleanup(b.t.Context()); err != nil {
			b.t.Errorf("Cleanup = %v, want nil", err)
		}
	}
	ends := map[string]func(b *intruder, p *proxier.Proxier, stop func()){
		"clean-up by the same process": func(b *intruder, p *proxier.Proxier, stop func()) { stop(); cleanup(b, p) },
		"clean-up by another process": func(b *intruder, _ *proxier.Proxier, stop func()) {
			stop()
			other, _ := b.start()
			cleanup(b, other)
		},
		"clean-up of both variants": func(b *intruder, _ *proxier.Proxier, stop func()) {
			stop()
			other, _ := b.start(func(c *Config) { c.Variant = VariantDetect })
			cleanup(b, other)
		},
		"a start without these node ports": func(b *intruder, _ *proxier.Proxier, stop func()) {
			stop()
			b.startWith(some(3), away)
		},
		"a start without these node ports, and clean-up": func(b *intruder, _ *proxier.Proxier, stop func()) {
			stop()
			p, stop := b.startWith(some(3), away)
			stop()
			cleanup(b, p)
		},
		"a restart, and clean-up by a third process": func(b *intruder, _ *proxier.Proxier, stop func()) {
			stop()
			_, stop = b.startWith(some(2))
			stop()
			other, _ := b.start()
			cleanup(b, other)
		},
	}
	for _, variant := range variants(t) {
		for name, end := range ends {
			for administrator, setting := range map[string]string{"": "", ", where an administrator has set it": settingAll, ", for one interface": settingLink} {
				t.Run(string(variant)+"/"+name+administrator, func(t *testing.T) {
					t.Parallel()
					b := newIntruder(t, variant)
					if setting == "" {
						b.mustStayOut("before the start")
					}
					p, stop := b.startOpen(setting)
					b.setting("1")
					b.mustStayOut("while it runs")
					end(b, p, stop)
					want := "0"
					if setting == settingAll {
						want = "1"
					}
					b.setting(want)
					if setting == settingLink {
						b.mustComeIn()
					} else {
						b.mustStayOut("after " + name)
					}
					if leftover := strings.Contains(b.save(), "-LOCALNET"); leftover != (setting == settingAll) {
						t.Errorf("the rule exists: %v, want it only while another program's setting for all interfaces is 1", leftover)
					}
				})
			}
		}
	}
}

// startOpen starts a Provider after an administrator has set a setting. Packets sent before the
// rule exists do not count.
func (b *intruder) startOpen(setting string) (p *proxier.Proxier, stop func()) {
	if setting != "" {
		netnstest.Check(b.t, b.ns.SetSysctl(setting, "1"))
		b.mustComeIn() // the test can detect packets
	}
	p, stop = b.startWith(some(3))
	b.ruled = b.sent.Load() // some of them may still wait in the socket
	return p, stop
}

// The record of an earlier process is written again after another program has flushed it: the clean-up restores the
// setting.
func TestTheRecordOfAnEarlierProcessIsWrittenAgain(t *testing.T) {
	t.Parallel()
	for _, variant := range variants(t) {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			b := &intruder{world: &world{t, netnstest.New(t), variant, proxier.DefaultNames()}}
			_, stop := b.startWith(some(1))
			stop()
			p, stop := b.startWith(some(1))
			b.run("iptables-"+string(variant), "-w", "-F")
			poll.Until(t, "the record is written again", func() bool { return strings.Contains(b.save(), "route_localnet was 0 before") })
			stop()
			netnstest.Check(t, p.Cleanup(t.Context()))
			b.setting("0")
			if strings.Contains(b.save(), "-LOCALNET") {
				t.Error("clean-up left the rule")
			}
		})
	}
}
