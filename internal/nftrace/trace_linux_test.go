package nftrace_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nftrace"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/packettrace"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// atServer opens a connection of the client to a port of a pod.
func (w *world) atServer(port uint16) desired.Packet {
	return desired.Packet{
		Protocol: desired.TCP, Source: w.Client.Addr(v1.IPv4Protocol), Origin: desired.FromOutside,
		Destination: netip.AddrPortFrom(w.LocalPods[0].Addr(v1.IPv4Protocol), port),
	}
}

// ask opens a connection of the client.
func (w *world) ask(network string, to netip.AddrPort) {
	_, _ = w.Client.Ask(w.t.Context(), network, to, proxiertest.AskOptions{Timeout: 10 * time.Second})
}

// Only packets that match are traced, up to the limit. The trace ends with the last one.
func TestOnlyPacketsThatMatchAreTraced(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	packet := w.atServer(8080)
	result, err := nftrace.Trace(t.Context(), nftrace.Options{
		NetNS: w.Node.NetNS(), Packet: packet, Limit: 3, Timeout: time.Minute,
		While: func(context.Context) error {
			for range 5 {
				w.ask("udp", packet.Destination)
				w.ask("tcp", netip.AddrPortFrom(packet.Destination.Addr(), 8081))
				w.ask("tcp", netip.AddrPortFrom(w.LocalPods[1].Addr(v1.IPv4Protocol), 8080))
				w.ask("tcp", packet.Destination)
			}
			return nil
		},
	})
	netnstest.Check(t, err)
	if len(result.Packets) != 3 {
		t.Errorf("%d packets, want the limit, 3", len(result.Packets))
	}
	ports := map[uint16]bool{}
	for _, p := range result.Packets {
		last := p.Hops[len(p.Hops)-1]
		ports[last.Source.Port()] = true
		if last.Destination != packet.Destination || last.Hook != "postrouting" || !last.End || p.Lost {
			t.Errorf("packet %+v, want one to %v that left the node", p, packet.Destination)
		}
	}
	if len(ports) != 3 {
		t.Errorf("source ports %v, want those of three connections", ports)
	}
	if left := w.tables(); left != nil {
		t.Errorf("tables %q remain", left)
	}
}

// A trace ends with its timeout or its context, if no packet comes.
func TestATraceEndsWithItsTimeout(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	options := nftrace.Options{NetNS: w.Node.NetNS(), Packet: w.atServer(8080), Timeout: 50 * time.Millisecond}
	result, err := nftrace.Trace(t.Context(), options)
	if j := nftrace.Compare(&result, &desired.Explanation{}, w.Config().Names); err != nil || j.Outcome != nftrace.OutcomeUnseen {
		t.Errorf("Trace = %+v, %v: %+v, want no packet", result, err, j)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	options.Timeout = nftrace.MaxTimeout
	if result, err = nftrace.Trace(ctx, options); err != nil || len(result.Packets) != 0 {
		t.Errorf("Trace with an ended context = %+v, %v, want no packet", result, err)
	}
}

// Traces at once see only their own packets.
func TestTracesAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	var tracing sync.WaitGroup
	for i := range 6 {
		tracing.Go(func() {
			packet := w.atServer(8080)
			packet.Destination = netip.AddrPortFrom(w.LocalPods[i%3].Addr(v1.IPv4Protocol), 8080)
			result, err := nftrace.Trace(t.Context(), nftrace.Options{
				NetNS: w.Node.NetNS(), Packet: packet, Send: true, SendFrom: w.Client.NetNS(), Timeout: time.Minute,
			})
			if err != nil || result.Sent != "answered" || len(result.Packets) != 1 || result.Packets[0].Hops[0].Destination != packet.Destination {
				t.Errorf("Trace = %+v, %v, want one packet to %v", result, err, packet.Destination)
			}
		})
	}
	tracing.Wait()
}

// A packet of the node to itself arrives again through lo, and is one packet.
func TestAPacketOfTheNodeToItself(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	to := netip.AddrPortFrom(w.Node.Addr(v1.IPv4Protocol), 31999)
	result, err := nftrace.Trace(t.Context(), nftrace.Options{
		NetNS: w.Node.NetNS(), Send: true, Timeout: time.Minute,
		Packet: desired.Packet{Protocol: desired.TCP, Source: to.Addr(), Destination: to, Origin: desired.FromNode},
	})
	netnstest.Check(t, err)
	j := nftrace.Compare(&result, &desired.Explanation{Verdict: desired.VerdictPass}, w.Config().Names)
	if hops := result.Packets[0].Hops; !j.Agrees || hops[0].Hook != "output" || hops[len(hops)-1].Hook != "input" {
		t.Errorf("hops %+v, judged %+v, want it delivered", hops, j)
	}
}

// An error says why a packet cannot be sent.
func TestWhatCannotBeSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	packet := w.atServer(8080)
	if _, err := nftrace.Trace(t.Context(), nftrace.Options{NetNS: w.Node.NetNS(), Packet: packet, Send: true}); err == nil {
		t.Error("a packet was sent from an address that the node does not have")
	}
	if _, err := nftrace.Trace(t.Context(), nftrace.Options{NetNS: "no-such-namespace", Packet: packet}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want %v", err, os.ErrNotExist)
	}
}

// leftVariable names the network namespace in which a process of the test leaves a table.
const leftVariable = "SERVICEPLANE_TRACE_UNTIL_KILLED"

// leaveATable traces until the process is killed, if a test has started it for that.
func leaveATable() {
	netNS := os.Getenv(leftVariable)
	if netNS == "" {
		return
	}
	trace := nftrace.Trace
	if os.Getenv(leftVariable+"_WITHOUT_OWNER") != "" {
		trace = nftrace.TraceWithoutOwner
	}
	_, _ = trace(context.Background(), nftrace.Options{
		NetNS: netNS, Timeout: nftrace.MaxTimeout,
		Packet: desired.Packet{Protocol: desired.TCP, Source: netip.MustParseAddr("192.0.2.1"), Destination: netip.MustParseAddrPort("192.0.2.2:80"), Origin: desired.FromOutside},
	})
	os.Exit(1)
}

// TestNothingIsLeftAfterAKill: the kernel deletes the table, and before Linux 5.12 the next
// trace does, but not the table of one that runs.
func TestNothingIsLeftAfterAKill(t *testing.T) {
	t.Parallel()
	for name, variable := range map[string]string{"owner": "X_UNUSED=", "before Linux 5.12": leftVariable + "_WITHOUT_OWNER=1"} {
		w := newWorld(t, nil)
		var running *exec.Cmd
		for i := range 2 {
			before := w.tables()
			running = exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^$")
			running.Env = append(os.Environ(), leftVariable+"="+w.Node.NetNS(), variable)
			netnstest.Check(t, running.Start())
			poll.Until(t, name+": another table", func() bool {
				return slices.ContainsFunc(w.tables(), func(name string) bool { return !slices.Contains(before, name) })
			})
			if i == 0 { // the other one runs on until the end
				netnstest.Check(t, running.Process.Kill())
				_ = running.Wait()
				if name == "owner" {
					poll.Until(t, "the kernel deletes the table", func() bool { return len(w.tables()) == 0 })
				}
			}
		}
		_, err := nftrace.Trace(t.Context(), nftrace.Options{NetNS: w.Node.NetNS(), Packet: w.atServer(80), Timeout: time.Millisecond})
		netnstest.Check(t, err)
		if got := w.tables(); len(got) != 1 {
			t.Errorf("%s: tables %q, want that of the running trace", name, got)
		}
		netnstest.Check(t, running.Process.Kill())
		_ = running.Wait()
	}
}

// A tracer for the debug page follows packets in the network namespace of the proxy, wherever its process is.
func TestATracerFollowsItsNamespace(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	explain := func(context.Context, desired.Packet) (e desired.Explanation, err error) { return e, nil }
	trace := packettrace.New(explain, proxier.DefaultNames(), w.Node.NetNS())
	a, err := trace(t.Context(), debughttp.TraceRequest{Packet: w.atServer(8080), Packets: 1, Timeout: time.Minute, Send: true, NetNS: w.Client.NetNS()})
	netnstest.Check(t, err)
	if a.Verdict != "passed" || a.Sent != "answered" {
		t.Errorf("the packet is %s by %s, %s, want it seen as it passes the node", a.Verdict, a.By, a.Sent)
	}
}

// TestConnectionTrackingIsAReason: rules translate only what opens a connection that connection tracking sees.
func TestConnectionTrackingIsAReason(t *testing.T) {
	t.Parallel()
	for name, engine := range engines {
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			w := newWorld(t, engine)
			packet := w.toService(desired.UDP, family)
			flow, err := w.Client.Open(t.Context(), "udp", packet.Destination, proxiertest.AskOptions{From: packet.Source})
			netnstest.Check(t, err)
			ask := func(ctx context.Context) error { _, err := flow.Ask(ctx); return err }
			netnstest.Check(t, ask(t.Context()))
			judge := func(e desired.Explanation) nftrace.Judgement {
				result, err := nftrace.Trace(t.Context(), nftrace.Options{NetNS: w.Node.NetNS(), Packet: packet, Timeout: time.Minute, While: ask})
				netnstest.Check(t, err)
				return nftrace.Compare(&result, &e, w.Config().Names)
			}
			e, err := w.proxy.Explain(t.Context(), packet)
			netnstest.Check(t, err)
			told := !netnstest.KernelBefore(t, 6, 16)
			if j := judge(e); !j.Agrees || strings.Contains(j.By, "as the first packet of its connection was") != told {
				t.Errorf("%s, %v: the second datagram: %+v, want it translated as the first one", name, family, j)
			}
			if j := judge(desired.Explanation{Verdict: desired.VerdictPass}); j.Agrees || strings.Contains(fmt.Sprint(j.Reasons), "ct state established") != told {
				t.Errorf("%s, %v: a Service that came later: %+v, want the older connection as a reason", name, family, j)
			}
			w.shell("nft add table inet foreign; add chain inet foreign left { type filter hook prerouting priority -300; }; add rule inet foreign left udp dport 80 notrack")
			if j := w.judge(packet); j.Agrees || strings.Contains(fmt.Sprint(j.Reasons), "ct state untracked") != told {
				t.Errorf("%s, %v: a datagram that is not tracked: %+v, want that as a reason", name, family, j)
			}
		}
	}
}
