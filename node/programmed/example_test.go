package programmed_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxier"
)

// A controller waits until no node sends to an endpoint that it has removed. Node 2 is behind.
func Example() {
	servers := map[string]*httptest.Server{}
	for node, version := range map[string]string{"node-1": "20", "node-2": "16"} {
		p := statusOf(changetracker.Versions{EndpointSlices: version})
		mux := http.NewServeMux()
		mux.Handle("/programmed", programmed.Handler(node, p)) // on each node
		servers[node] = httptest.NewServer(mux)
		defer servers[node].Close()
	}
	ctx, stop := context.WithTimeout(context.Background(), 150*time.Millisecond)
	defer stop()
	service := types.NamespacedName{Namespace: "shop", Name: "web"}
	slice := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "17"}}
	nodes := func(context.Context) ([]string, error) { return []string{"node-1", "node-2"}, nil }
	address := func(node string) string { return servers[node].URL + "/programmed" }

	err := programmed.Wait(ctx, programmed.Waiting{Nodes: nodes, Ask: programmed.OverHTTP(http.DefaultClient, address)}, programmed.ServiceChange{
		Service: service, Versions: changetracker.Versions{EndpointSlices: slice.ResourceVersion},
	}) // names the nodes that are behind, and why
	fmt.Println(err)
	// Output:
	// 1 nodes have not programmed the change (context deadline exceeded): node node-2: IPv4: EndpointSlices are those of version 16, want 17
}

// provider stands for a proxier.Provider.
type provider struct{ status proxier.Status }

func (p provider) Status() proxier.Status { return p.status }

func (p provider) Sends(...netip.AddrPort) []proxier.Sending { return nil }

func statusOf(v changetracker.Versions) provider {
	return provider{proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: {Synced: true, Versions: v}}}}
}
