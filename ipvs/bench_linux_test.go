package ipvs

import (
	"fmt"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
)

// BenchmarkReplaceEndpoint is one partial update with one endpoint instead of another.
// Neither time nor memory may grow with the number of Services.
func BenchmarkReplaceEndpoint(b *testing.B) {
	for _, services := range []int{1000, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			n := newFakeNode()
			e := n.engine(b)
			mustApply(b, e, full(cluster(services)...))
			name, vip := clusterName(services/2), clusterVIP(services/2)
			updates := []desired.Update{partial(service(name, vip, pod1, pod3)), partial(service(name, vip, pod1, pod2))}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				mustApply(b, e, updates[i%2])
			}
		})
	}
}

// BenchmarkFullSync is a full update that finds everything as it must be.
func BenchmarkFullSync(b *testing.B) {
	for _, services := range []int{1000, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			n := newFakeNode()
			e := n.engine(b)
			u := full(cluster(services)...)
			mustApply(b, e, u)
			b.ReportAllocs()
			for b.Loop() {
				mustApply(b, e, u)
			}
		})
	}
}
