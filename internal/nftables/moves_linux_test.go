package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// watchedKernel calls a function after each transaction.
type watchedKernel struct {
	kernel
	committed func(bytes int)
}

func (k *watchedKernel) Commit(ctx context.Context, b *nft.Batch) error {
	err := k.kernel.Commit(ctx, b)
	if k.committed != nil {
		k.committed(len(b.Buf))
	}
	return err
}

// TestALargeChangeIsManySmallTransactions deletes thousands of Services, and creates as many. Some external IPs pass
// from old ones to new ones, and from those to others that exist: they serve after each transaction.
func TestALargeChangeIsManySmallTransactions(t *testing.T) {
	t.Parallel()
	const services, every, most = 3000, 10, 128 << 10
	w := &world{family: v1.IPv4Protocol}
	ns := netnstest.New(t)
	config := proxier.Config{NetNS: ns.Path(), Families: []v1.IPFamily{w.family}, Runner: runner.Options{Gather: time.Minute}} // until the test syncs
	engine, err := NewEngine(Config{Config: config}, w.family, proxier.Deps{})
	netnstest.Check(t, err)
	reader, err := NewEngine(Config{Config: config}, w.family, proxier.Deps{})
	netnstest.Check(t, err)
	netnstest.Check(t, reader.connect())
	defer reader.Close()
	k := &watchedKernel{}
	open := engine.open
	engine.open = func() (_ kernel, err error) { k.kernel, err = open(); return k, err }
	p, err := proxier.New(config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{w.family: engine})
	netnstest.Check(t, err)
	poll.Background(t, p.Run)

	service := func(kind string, i int, more ...proxiertest.ServiceOption) *v1.Service {
		ip := fmt.Sprintf("10.%d.%d.%d", map[string]int{"old": 96, "new": 97, "heir": 98}[kind], i>>8, i&255)
		s := proxiertest.Service("ns", fmt.Sprint(kind, i), append(more, proxiertest.ClusterIPs(ip), proxiertest.Port("http", v1.ProtocolTCP, 80))...)
		s.UID = types.UID(s.Name)
		return s
	}
	externalIP := func(i int) string { return fmt.Sprintf("203.0.%d.%d", i>>8, i&255) }
	external := func(i int) proxiertest.ServiceOption { return proxiertest.ExternalIPs(externalIP(i)) }
	slice := func(s *v1.Service) *discovery.EndpointSlice {
		return proxiertest.Slice("ns", s.Name, discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.0.1"), proxiertest.Endpoint("10.244.0.2"))
	}
	add := func(s *v1.Service) *v1.Service {
		p.OnServiceAdd(s)
		p.OnEndpointSliceAdd(slice(s))
		return s
	}
	var old []*v1.Service
	for i := range services {
		old = append(old, add(service("old", i, external(i), proxiertest.Created(time.Unix(1, 0)))))
	}
	for i := 0; i < services; i += every { // they claim what older ones have
		add(service("heir", i, external(i+1), external(i+2), proxiertest.Created(time.Unix(2, 0))))
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))

	transactions, largest := 0, 0
	k.committed = func(bytes int) {
		transactions, largest = transactions+1, max(largest, bytes)
		has := w.observed(t, reader, 1<<30).element[setServices]
		for i := 0; i < services; i += every {
			for _, moved := range []int{i, i + 1, i + 2} {
				vip := netip.MustParseAddr(externalIP(moved))
				key := frontendKey(desired.Key{VIP: vip, Protocol: desired.TCP, Port: 80})
				if _, served := has[string(key.bytes())]; !served {
					t.Errorf("after transaction %d: nobody serves %v", transactions, vip)
				}
			}
		}
	}
	for i, s := range old {
		p.OnServiceDelete(s)
		p.OnEndpointSliceDelete(slice(s))
		if i%every == 0 {
			add(service("new", i, external(i), proxiertest.Created(time.Unix(3, 0))))
		} else {
			add(service("new", i, proxiertest.Created(time.Unix(3, 0))))
		}
	}
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	t.Logf("%d transactions, the largest of %d bytes", transactions, largest)
	if largest > most || transactions < services/100 {
		t.Errorf("%d transactions, the largest of %d bytes; want none of more than %d", transactions, largest, most)
	}
}
