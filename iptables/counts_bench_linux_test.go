package iptables

import (
	"fmt"
	"os"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// BenchmarkCounts measures what counting connections costs: a sync that replaces an endpoint, with
// and without, and a reading. Its check is that all connections between syncs are counted.
func BenchmarkCounts(b *testing.B) {
	services, endpoints, connections := 200, 10, 50
	if os.Getenv(benchFull) == "1" {
		services, connections = 1000, 1000
	}
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		c := newCountedNode(b, variant, proxier.DefaultNames(), 1)
		c.b.services = newServices(services, endpoints)
		for _, s := range c.b.services {
			s.Protocol, s.Name.Protocol = desired.UDP, v1.ProtocolUDP
		}
		off := &bench{variant: variant, names: proxier.DefaultNames(), services: c.b.services, ns: netnstest.New(b)}
		plain := off.engine(b, off.ns)
		b.Cleanup(func() { netnstest.Check(b, plain.Close()) })
		for _, of := range []struct {
			name string
			e    *engine
		}{{"off", plain}, {"on", c.engine}} {
			off.apply(b, of.e, off.fullUpdate())
			b.Run(fmt.Sprintf("%s/N=%d/E=%d/replaced=1/counts=%s", variant, services, endpoints, of.name), func(b *testing.B) {
				versions := [2]*desired.Service{replaced(c.b.services[7], 1), c.b.services[7]}
				var r report
				for i := range b.N {
					off.apply(b, of.e, off.update(versions[i%2:][:1]))
					r.add(of.e.report)
				}
				b.StopTimer()
				r.print(b)
			})
		}
		for _, s := range c.b.services[:connections%len(c.b.services)+1] {
			c.connect(b, s, 1)
		}
		b.Run(fmt.Sprintf("%s/N=%d/E=%d/reading", variant, services, endpoints), func(b *testing.B) {
			var got map[string]uint64
			for range b.N {
				got = c.counted(b, nil)
			}
			for name, n := range c.sent {
				if got[name] != n {
					b.Errorf("%s has %d connections, want %d", name, got[name], n)
				}
			}
		})
	}
}
