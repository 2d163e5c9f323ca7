package desired

import (
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// BenchmarkExplain measures Explain among 10,000 Services with two endpoints each. Only the service ports that the
// packet may be for cost time.
func BenchmarkExplain(b *testing.B) {
	const services = 10_000
	var ports []changetracker.ServicePort
	for i := range uint16(services) {
		name := webName
		name.NamespacedName = types.NamespacedName{Namespace: "default", Name: fmt.Sprintf("svc-%d", i)}
		addr := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
		ports = append(ports, changetracker.ServicePort{Name: name, ClusterIP: addr, Port: 80, NodePort: 30_000 + i})
	}
	x := explainerOf(b, ports, local(1), remote(2))
	for what, to := range map[string]string{
		"ClusterIP": "10.96.19.136:80", "node-port": "192.0.2.10:35000", "another-port": "10.96.19.136:81", "nobody": "198.51.100.99:80",
	} {
		b.Run(fmt.Sprintf("N=%d/%s", services, what), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := x.explain(packetTo(to)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
