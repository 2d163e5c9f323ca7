package healthcheck_test

import (
	"context"
	"fmt"
	"net/http"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// A proxy that serves health check node ports, and its own health at port 10256 like
// kube-proxy.
func Example() {
	config := proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}
	deps := proxier.Deps{Health: healthcheck.NewNodePortServer(healthcheck.NodePortOptions{})}
	engines := map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}}
	p, err := proxier.New(config, deps, engines)
	if err != nil {
		fmt.Println(err)
		return
	}
	server := &healthcheck.Server{
		Name: "healthz", Address: "127.0.0.1:10256", Handler: healthcheck.NewHandler(p.Status, healthcheck.HandlerOptions{}),
	}
	run := func(ctx context.Context) error {
		ended := make(chan error, 1)
		go func() { ended <- server.Run(ctx) }()
		if err := p.Run(ctx); err != nil {
			return err
		}
		return <-ended
	}
	ctx, stop := context.WithCancel(context.Background())
	stop() // a program would run until it is told to end
	fmt.Println(run(ctx))
	// Output: <nil>
}

// Reasons describe faults for people.
func ExampleEvaluate() {
	status := proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: {}}}
	report := healthcheck.Evaluate(status, 0, status.LastQueued)
	fmt.Println(report.Healthy, report.Reasons)
	// Output: false [IPv4: not programmed yet]
}

func ExampleNewHandler() {
	status := func() proxier.Status { return proxier.Status{} }
	handler := healthcheck.NewHandler(status, healthcheck.HandlerOptions{
		Answered: func(path string, code int) { fmt.Println(path, code) }, // count it
	})
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, healthcheck.LivezPath, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	handler.ServeHTTP(discard{http.Header{}}, request)
	// Output: /livez 503
}

type discard struct{ header http.Header }

func (d discard) Header() http.Header         { return d.header }
func (d discard) Write(p []byte) (int, error) { return len(p), nil }
func (d discard) WriteHeader(int)             {}
