package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestLostSocketsAreOpenedAgain: a socket that another program has closed is missing, at the address of
// a frontend and at a proxy port, in both IP families. One that a hook returned is not the kernel's.
func TestVerifyAsksTheKernel(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		protocol v1.Protocol
		family   v1.IPFamily
		change   func(*Config)
		missing  bool
	}{
		"TCP":           {v1.ProtocolTCP, v1.IPv4Protocol, nil, true},
		"UDP":           {v1.ProtocolUDP, v1.IPv4Protocol, nil, true},
		"TCP over IPv6": {v1.ProtocolTCP, v1.IPv6Protocol, nil, true},
		"UDP over IPv6": {v1.ProtocolUDP, v1.IPv6Protocol, nil, true},
		"a hook's": {v1.ProtocolTCP, v1.IPv4Protocol, func(c *Config) {
			c.Hooks.Listen = func(ctx context.Context, at Site) (net.Listener, error) {
				l, err := new(net.ListenConfig).Listen(ctx, at.Network, at.Addr.String())
				return struct{ net.Listener }{l}, err
			}
		}, false},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			config := Config{}
			if c.change != nil {
				c.change(&config)
			}
			e, err := NewEngine(config, c.family, proxier.Deps{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = e.Close() })
			vip, endpoint := "192.0.2.1", "127.0.0.1"
			if c.family == v1.IPv6Protocol {
				vip, endpoint = "2001:db8::1", "::1"
			}
			s := servicePort("a", c.protocol, []desired.Frontend{clusterIP(vip, 80)}, netip.AddrPortFrom(netip.MustParseAddr(endpoint), 9))
			u := desired.Update{Family: c.family, Full: true, Changes: desired.ChangesTo(s)}
			if result, err := e.Apply(t.Context(), u); err != nil || len(result.Failed) > 0 {
				t.Fatalf("Apply = %v, %v", result, err)
			}
			mustDiffer(t, e, u, false)
			for _, socket := range e.services[s.Name].sockets {
				if socket.ofKernel != c.missing {
					t.Errorf("the socket is the kernel's: %v, want %v", socket.ofKernel, c.missing)
				}
				socket.close()
			}
			mustDiffer(t, e, u, c.missing)
			if result, err := e.Apply(t.Context(), u); err != nil || len(result.Failed) > 0 {
				t.Fatalf("Apply = %v, %v", result, err)
			}
			mustDiffer(t, e, u, false)
		})
	}
}

// mustDiffer waits, since the kernel may close sockets a little later.
func mustDiffer(t *testing.T, e *Engine, u desired.Update, missing bool) {
	t.Helper()
	var report proxier.Verification
	poll.Until(t, "what Verify finds", func() bool {
		var err error
		if report, err = e.Verify(t.Context(), u); err != nil && !errors.Is(err, errors.ErrUnsupported) {
			t.Fatalf("Verify = %v", err)
		}
		return len(report.Differences) > 0 == missing
	})
	for _, d := range report.Differences {
		if d.Problem != proxier.DifferenceMissing || d.Service.Name != "a" || !strings.HasPrefix(d.Object, "socket of role") {
			t.Errorf("difference %+v, want a socket that is missing", d)
		}
	}
}

// TestConnectionsCostNoMemory: a full sync lists the node's sockets, most of which are connections.
func TestConnectionsCostNoMemory(t *testing.T) {
	line := []byte("  12: 0100007F:1F90 0100007F:C350 06 00000000:00000000 03:00001770 00000000     0        0 0 3 0000000000000000")
	if n := testing.AllocsPerRun(100, func() { parseSocket(line, desired.TCP) }); n > 0 {
		t.Errorf("%v allocations for the line of a connection, want 0", n)
	}
}

// FuzzSocketLine: no line of /proc/net/tcp6 makes the parser fail.
func FuzzSocketLine(f *testing.F) {
	f.Add("   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1")
	f.Add("   1: B80D0120000000000000000001000000:0050 00000000000000000000000000000000:0000 0A")
	f.Fuzz(func(t *testing.T, line string) {
		if addr, ok := parseSocket([]byte(line), desired.TCP); ok && !addr.IsValid() {
			t.Errorf("%q: no address", line)
		}
	})
}
