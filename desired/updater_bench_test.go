package desired

import (
	"fmt"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// BenchmarkUpdater makes the Update of one changed endpoint and the full one, among Services
// with a ClusterIP, a node port and an external IP each.
func BenchmarkUpdater(b *testing.B) {
	const services = 30_000
	tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
	if err != nil {
		b.Fatal(err)
	}
	for i := range uint16(services) {
		name := webName
		name.Name = fmt.Sprintf("svc-%d", i)
		_, _ = tracker.Services.Set(name.NamespacedName, changetracker.ServicePort{
			Name: name, ClusterIP: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80, NodePort: 30_000 + i,
			ExternalIPs: []netip.Addr{netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)})},
		})
		_, _ = tracker.Endpoints.Set(name, remote(1), remote(2))
	}
	u := NewUpdater()
	apply := func(full bool) {
		_ = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			if update := u.Next(delta, Resolver{DetectsPods: true}, Globals{}, full); len(update.Changes) == 0 {
				b.Error("nothing has changed")
			}
			u.Done(nil)
			return nil, nil
		})
	}
	apply(true)
	version := byte(2)
	for _, full := range []bool{true, false} {
		b.Run(fmt.Sprintf("N=%d/full=%t", services, full), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				version = 5 - version // 2 or 3
				name := webName
				name.Name = "svc-500"
				_, _ = tracker.Endpoints.Set(name, remote(1), remote(version))
				apply(full)
			}
		})
	}
}
