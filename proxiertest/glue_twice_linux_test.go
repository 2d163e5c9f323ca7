package proxiertest_test

import (
	"context"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// serve runs a proxy until ctx ends, as a part of a larger program. It calls ready when
// everything is programmed.
func serve(ctx context.Context, config nftables.Config, feed func(proxier.EventHandler), ready func(*proxier.Proxier)) error {
	p, err := nftables.New(config, proxier.Deps{})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	feed(p)
	if err := proxiertest.Sync(ctx, p); err != nil {
		stop()
		<-ended
		return err
	}
	ready(p)
	return <-ended
}

// A program starts the glue twice in one process, with the same names: the second start takes over the objects of
// the first one, and no goroutine remains.
func TestGlueOfAProgramThatStartsItTwice(t *testing.T) {
	ns := netnstest.New(t)
	config := nftables.Config{Config: proxier.Config{
		NetNS: ns.Path(), Node: changetracker.Node{Name: "node", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}},
	}}
	feed := func(h proxier.EventHandler) {
		h.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
		h.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
			proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.1.0.1")))
		h.OnServiceSynced()
		h.OnEndpointSlicesSynced()
	}
	holds := func() bool {
		engine, err := nftables.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
		netnstest.Check(t, err)
		defer func() { netnstest.Check(t, engine.Close()) }()
		var text strings.Builder
		netnstest.Check(t, engine.Abilities().Dump(t.Context(), &text))
		return strings.Contains(text.String(), "10.96.0.10")
	}
	before := runtime.NumGoroutine()
	var last *proxier.Proxier
	for _, when := range []string{"the first time", "the second time"} {
		ctx, stop := context.WithCancel(t.Context())
		err := serve(ctx, config, feed, func(p *proxier.Proxier) {
			if last = p; !holds() {
				t.Errorf("%s: the Service is not programmed", when)
			}
			stop()
		})
		if stop(); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if !holds() {
			t.Errorf("%s: the Service is deleted when the proxy ends", when)
		}
	}
	poll.Until(t, "the goroutines end", func() bool { return runtime.NumGoroutine() <= before })
	if err := last.Cleanup(t.Context()); err != nil || holds() {
		t.Errorf("Cleanup = %v, want nothing left", err)
	}
}
