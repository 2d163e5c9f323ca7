package programmed_test

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/programmed"
)

// A controller waits until no node sends to an endpoint that it has removed with version 17.
func ExampleWait() {
	ctx, stop := context.WithTimeout(context.Background(), 150*time.Millisecond)
	defer stop()
	err := programmed.Wait(ctx, programmed.Waiting{
		Nodes: func(context.Context) ([]string, error) { return []string{"node-1", "node-2"}, nil },
		Ask: func(_ context.Context, node string, _ types.NamespacedName) (programmed.Report, error) {
			has := map[string]string{"node-1": "20", "node-2": "16"}[node]
			return programmed.Report{Node: node, Families: map[v1.IPFamily]programmed.Family{v1.IPv4Protocol: {EndpointSlices: has}}}, nil
		},
	}, programmed.Change{
		Service:  types.NamespacedName{Namespace: "shop", Name: "web"},
		Versions: changetracker.Versions{EndpointSlices: "17"},
	})
	fmt.Println(err)
	// Output:
	// 1 nodes have not programmed the change (context deadline exceeded): node node-2: IPv4: EndpointSlices are those of version 16, want 17
}
