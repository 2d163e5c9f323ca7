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
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestVerifyAsksTheKernel: a socket that root has closed is missing, and a full sync opens it again, at the
// address of a frontend and at a port that the system chose, in both IP families. A UDP socket goes on at the
// port that it asked for. A listener of a hook that is no socket is never missing.
func TestVerifyAsksTheKernel(t *testing.T) {
	t.Parallel()
	plain := func(c *Config) {
		var listen net.ListenConfig
		listen.SetMultipathTCP(false) // which root cannot close
		c.Hooks.Listen = func(ctx context.Context, at Site) (net.Listener, error) {
			return listen.Listen(ctx, at.Network, at.Addr.String())
		}
	}
	atFrontends := func(c *Config) { plain(c); c.AtFrontends = true }
	noSocket := func(c *Config) {
		plain(c)
		listen := c.Hooks.Listen
		c.Hooks.Listen = func(ctx context.Context, at Site) (net.Listener, error) {
			l, err := listen(ctx, at)
			return struct{ net.Listener }{l}, err
		}
	}
	vips := map[v1.IPFamily]string{v1.IPv4Protocol: "192.0.2.1", v1.IPv6Protocol: "2001:db8::1"}
	for what, c := range map[string]struct {
		protocol v1.Protocol
		change   func(*Config)
		missing  bool
	}{
		"TCP":                  {v1.ProtocolTCP, plain, true},
		"UDP":                  {v1.ProtocolUDP, plain, true},
		"TCP at the frontend":  {v1.ProtocolTCP, atFrontends, true},
		"UDP at the frontend":  {v1.ProtocolUDP, atFrontends, false},
		"a listener of a hook": {v1.ProtocolTCP, noSocket, false},
	} {
		for family, vip := range vips {
			t.Run(what+"/"+string(family), func(t *testing.T) {
				t.Parallel()
				ns, vip := netnstest.New(t), netip.MustParseAddr(vip)
				netnstest.Check(t, ns.AddAddrs("lo", netip.PrefixFrom(vip, vip.BitLen())))
				config := Config{Config: proxier.Config{NetNS: ns.Path()}}
				c.change(&config)
				e, err := NewEngine(config, family, proxier.Deps{})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = e.Close() })
				s := servicePort("a", c.protocol, []desired.Frontend{clusterIP(vip.String(), 80)}, netip.AddrPortFrom(vip, 9))
				u := desired.Update{Family: family, Full: true, Changes: desired.ChangesTo(s)}
				apply := func() {
					if result, err := e.Apply(t.Context(), u); err != nil || len(result.Failed) > 0 {
						t.Fatalf("Apply = %v, %v", result, err)
					}
					mustDiffer(t, e, u, false)
				}
				apply()
				for _, socket := range e.services[s.Name].sockets {
					netnstest.Check(t, ns.CloseSocket(strings.ToLower(string(c.protocol)), socket.site.Addr, ""))
				}
				mustDiffer(t, e, u, c.missing)
				apply()
			})
		}
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
