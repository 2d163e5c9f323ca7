package nodedeps_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func ExampleComplete() {
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	engines := map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}}
	deps := nodedeps.Complete(config, proxier.Deps{})
	_, err := proxier.New(config, deps, engines)
	fmt.Println(deps.Conntrack != nil, deps.Health != nil, err)
	// Output: true true <nil>
}

// Complete sets the fields that are nil, and keeps all others.
func TestCompleteSetsWhatIsNil(t *testing.T) {
	none := nodedeps.Complete(proxier.Config{}, proxier.Deps{})
	if none.Conntrack == nil || none.Health == nil || none.LocalAddresses == nil {
		t.Fatalf("Complete = %+v, want Conntrack, Health and LocalAddresses set", none)
	}
	if addrs, err := none.LocalAddresses(t.Context()); err != nil || !slices.Contains(addrs, netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("LocalAddresses = %v, %v, want 127.0.0.1 among them", addrs, err)
	}
	cleaner, health := conntrack.New(conntrack.Options{}), proxier.NoHealth()
	own := nodedeps.Complete(proxier.Config{}, proxier.Deps{
		Conntrack: cleaner, Health: health,
		LocalAddresses: func(context.Context) ([]netip.Addr, error) { return nil, nil },
	})
	if addrs, _ := own.LocalAddresses(t.Context()); own.Conntrack != cleaner || own.Health != health || addrs != nil {
		t.Errorf("Complete replaced fields that were set: %+v", own)
	}
}
