package nftables

import (
	"bytes"
	"context"
	"testing"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// chunkedKernel does something when some elements of each list have arrived.
type chunkedKernel struct {
	kernel
	during func()
}

func (k *chunkedKernel) Dump(ctx context.Context, b *nft.Batch, reset func(), each func([]byte)) error {
	n, elements := 0, bytes.Contains(b.Buf, []byte("endpoints\x00"))
	return k.kernel.Dump(ctx, b, reset, func(attrs []byte) {
		each(attrs)
		if n++; elements && n%4 == 0 {
			k.during()
		}
	})
}

// TestAnUntouchedTableHasNoDifferenceBesideChanges: service ports go and come while a check reads a large table.
func TestAnUntouchedTableHasNoDifferenceBesideChanges(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		const services = 4000
		e, m := w.engine(t, netnstest.New(t)), model{}
		e.askFrom = 1 << 30
		service := func(n int) *desired.Service {
			s := &desired.Service{Name: name(n), Protocol: desired.TCP}
			for i := range 4 {
				s.Cluster = s.Cluster.With(endpointOf(w, i))
			}
			w.add(s, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNonPod})
			return s
		}
		for n := range services {
			m[name(n)] = service(n)
		}
		mustApply(t, e, m.full(w))
		open, next, gone := e.open, 0, false
		e.open = func() (kernel, error) {
			k, err := open()
			return &chunkedKernel{k, func() {
				u := desired.Update{Family: w.family, Globals: w.globals()}
				for n := next; n < next+20; n++ {
					c := desired.Change{Name: name(n)}
					if gone {
						c.After = m[name(n)]
					}
					u.Changes = append(u.Changes, c)
				}
				if gone {
					next += 20
				}
				gone = !gone
				mustApply(t, e, u)
			}}, err
		}
		if found := mustCheck(t, e); len(found) > 0 {
			t.Errorf("%d differences beside changes of %d service ports, the first one %v", len(found), next, found[0])
		}
		if gone {
			mustApply(t, e, m.full(w))
		}
		mustWriteNothing(t, e, m.full(w), "nobody has changed the table")
	})
}
