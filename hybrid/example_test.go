package hybrid_test

import (
	"context"
	"fmt"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/hybrid"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// Services whose name begins with "edge-" go to another engine. Real members come from
// nftables.NewEngine, userspace.NewEngine and the like.
func ExampleNew() {
	kernel, sockets := &proxiertest.RecordingEngine{}, &proxiertest.RecordingEngine{}
	engine, err := hybrid.New(func(s *desired.Service, _ desired.Kind) string {
		if strings.HasPrefix(s.Name.Name, "edge-") {
			return "sockets"
		}
		return "kernel"
	}, hybrid.Member{Name: "kernel", Engine: kernel}, hybrid.Member{Name: "sockets", Engine: sockets})
	if err != nil {
		fmt.Println(err)
		return
	}
	var web, edge changetracker.ServicePortName
	web.Name, edge.Name = "web", "edge-web"
	update := desired.Update{Full: true, Changes: desired.ChangesTo(&desired.Service{Name: web}, &desired.Service{Name: edge})}
	if _, err := engine.Apply(context.Background(), update); err != nil {
		fmt.Println(err)
	}
	fmt.Println(len(kernel.Services()), "in the kernel,", len(sockets.Services()), "with sockets")
	// Output: 1 in the kernel, 1 with sockets
}
