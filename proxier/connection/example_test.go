package connection_test

import (
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// printer is a proxier.Observer that also observes connections.
type printer struct{}

var _ connection.Observer = printer{}

func (printer) ObserveSync(proxier.SyncReport) {}

func (printer) ObserveConnection(r connection.Report) {
	fmt.Println(r.Client, "to", r.Dialled, r.Outcome, "by", r.Endpoint)
}

// The Observer of connections is part of Deps, as the Observer of syncs.
func ExampleObserver() {
	deps := proxier.Deps{Observer: printer{}} // for userspace.New

	// The engine does this when a connection has ended.
	deps.Observer.(connection.Observer).ObserveConnection(connection.Report{
		Client: netip.MustParseAddrPort("10.244.0.7:40000"), Dialled: netip.MustParseAddrPort("10.96.0.1:80"),
		Endpoint: netip.MustParseAddrPort("10.244.1.2:8080"), Outcome: connection.Served,
	})
	// Output: 10.244.0.7:40000 to 10.96.0.1:80 served by 10.244.1.2:8080
}
