package nftables

import (
	"context"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
	"golang.org/x/sys/unix"
)

// measureSustained is the 99th percentile of the time from an event to the programmed
// kernel, with the default rate limits. Each event changes an endpoint of another Service,
// at a fixed time. rate is the number of events per second.
func measureSustained(b *testing.B, c *cluster, events int, every time.Duration) (f figure, rate float64) {
	b.Helper()
	p := startLimited(b, c, netnstest.New(b), runner.Options{})
	defer p.stop()
	p.load(b)
	cpu, start := cpuTime(), time.Now()
	for i := range events {
		// A late beat shortens the next wait, so that the rate stays.
		time.Sleep(time.Until(start.Add(time.Duration(i) * every)))
		slice := replaced(c.slices[i*37%len(c.slices)], i)
		p.mu.Lock()
		p.underWay = append(p.underWay, time.Now())
		p.mu.Unlock()
		p.OnEndpointSliceUpdate(nil, slice)
	}
	rate = float64(events) / time.Since(start).Seconds()
	p.sync(b)
	f.cpu = (cpuTime() - cpu) / time.Duration(events)
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.latencies) < events {
		b.Errorf("%d of %d events reached the kernel", len(p.latencies), events)
		return f, rate
	}
	slices.Sort(p.latencies)
	f.wall = p.latencies[len(p.latencies)*99/100]
	return f, rate
}

// measureFirstService is the time from the start of the first sync until a connection to an
// important Service is established, while all others are loaded.
func measureFirstService(b *testing.B, c *cluster, runs int) figure {
	b.Helper()
	const last = "10.0.0.0/8"
	node, peer := netnstest.New(b), netnstest.New(b)
	netnstest.Connect(b, node, []string{"192.0.2.1/24"}, peer, []string{"192.0.2.2/24"})
	netnstest.Check(b, node.AddRoute(netip.MustParsePrefix(last), netip.MustParseAddr("192.0.2.2")))
	netnstest.Serve(b, peer, "first", 8080)
	important := *c.services[len(c.services)-1].DeepCopy()
	slice := newSlice(important.ObjectMeta, 0, 1)
	slice.Endpoints[0].Addresses = []string{"192.0.2.2"}
	vip := netip.AddrPortFrom(netip.MustParseAddr(important.Spec.ClusterIP), 80)

	var p *programmed
	f := measure(runs, func() {
		if p != nil {
			p.stopAndClean(b)
		}
		name := types.NamespacedName{Namespace: important.Namespace, Name: important.Name}
		p = startConfigured(b, c, node, proxier.Config{Important: []types.NamespacedName{name}})
		for i := range c.services {
			p.OnServiceAdd(c.services[i])
			p.OnEndpointSliceAdd(c.slices[i])
		}
		p.OnEndpointSliceUpdate(nil, slice)
		p.OnServiceSynced()
	}, func() {
		p.OnEndpointSlicesSynced() // now the sync starts
		for {
			if _, err := netns.Ask(b.Context(), node, "tcp", vip, netns.AskOptions{Timeout: 4 * time.Millisecond}); err == nil {
				return
			}
		}
	})
	p.stopAndClean(b)
	f.allocs = 0 // mostly those of the connections that are tried
	return f
}

// stopAndClean stops a Provider after its sync, and deletes its table.
func (p *programmed) stopAndClean(b *testing.B) {
	p.sync(b)
	p.stop()
	if err := p.Cleanup(b.Context()); err != nil {
		b.Fatalf("clean up: %v", err)
	}
}

// measureRepair is the time from the deletion of the table by another program until it is
// complete again. It may be measured three times: further repairs are delayed.
func (p *programmed) measureRepair(b *testing.B, runs int) figure {
	b.Helper()
	k := openKernel(b, p.ns)
	defer k.Close()
	var repairs atomic.Int64
	p.onRepair.Store(&repairs)
	f := measure(runs, func() {}, func() {
		before := repairs.Load()
		w := newWire(unix.NFPROTO_IPV4, p.engine.config.Names.Table)
		w.Begin()
		w.DeleteTable()
		w.Finish()
		if err := k.Commit(context.WithoutCancel(b.Context()), &w.Batch); err != nil {
			b.Fatalf("delete the table: %v", err)
		}
		for repairs.Load() == before {
			time.Sleep(100 * time.Microsecond)
		}
	})
	f.allocs = 0 // how often it looks, and what else the Provider hears, is chance
	return f
}
