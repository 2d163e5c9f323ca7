package nftables_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// sizes is an engine of nftables that counts the changes of its Updates, and writes nothing.
type sizes struct {
	proxier.Engine

	mu   sync.Mutex // guards seen
	seen []int
}

func (s *sizes) Apply(_ context.Context, u desired.Update) (proxier.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, len(u.Changes))
	return proxier.Result{}, nil
}

// Abilities has no functions that need a kernel.
func (s *sizes) Abilities() proxier.Abilities {
	return proxier.Abilities{Part: s.Engine.Abilities().Part}
}

// TestALargeChangeIsInParts: a Provider with the engine of nftables takes a first sync as a whole, and a large change
// later in parts, which Sync waits for. It needs no kernel.
func TestALargeChangeIsInParts(t *testing.T) {
	const services = 5_000
	s := &sizes{}
	deps := proxier.Deps{
		Conntrack: &proxier.Conntrack{
			Tracks: func(desired.Protocol) bool { return false },
			Clean:  func(context.Context, v1.IPFamily, desired.FlowCheck) (int, error) { return 0, nil },
		},
		Health: proxier.NoHealth(),
		Wrap:   func(_ v1.IPFamily, e proxier.Engine) (proxier.Engine, error) { s.Engine = e; return s, nil },
	}
	p, err := nftables.New(nftables.Config{Config: proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}}, deps)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- p.Run(ctx) }()
	add := func(first int) {
		for i := first; i < first+services; i++ {
			p.OnServiceAdd(proxiertest.Service(fmt.Sprintf("ns-%d", i%10), strconv.Itoa(i),
				proxiertest.ClusterIPs(fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255)), proxiertest.Port("web", v1.ProtocolTCP, 80)))
		}
	}
	add(1)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	if err := p.Sync(ctx); err != nil {
		t.Error(err)
	}
	add(1 + services)
	if err := p.Sync(ctx); err != nil {
		t.Error(err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	all := 0
	for i, n := range s.seen {
		if all += n; i == 0 && n != services || i > 0 && n > 1_001 {
			t.Errorf("Update %d has %d changes, want the first one to have %d, and others at most 1001", i, n, services)
		}
	}
	if all != 2*services {
		t.Errorf("the Updates have %d changes, want %d", all, 2*services)
	}
}
