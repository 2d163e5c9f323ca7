package canary_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// A program serves health with what the canary found: a data plane that forwards nothing is no healthy one.
func Example() {
	families := []v1.IPFamily{v1.IPv4Protocol}
	p, err := proxier.New(proxier.Config{Families: families, Runner: runner.Options{MinInterval: runner.Unlimited}}, proxier.Deps{},
		map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}}) // it programs nothing
	tests, errCanary := canary.New(canary.Options{Interval: time.Second})
	if err = errors.Join(err, errCanary); err != nil {
		fmt.Println(err)
		return
	}
	status := tests.Extend(p.Status) // for healthcheck.NewHandler and metrics
	ctx, stop := context.WithCancel(context.Background())
	stop() // a program runs both until it ends
	err = errors.Join(p.Run(ctx), tests.Run(ctx, p))
	fmt.Println(len(status().Conditions), "conditions, error", err)
	// Output: 0 conditions, error <nil>
}
