package runner_test

import (
	"context"
	"fmt"
	"time"

	"github.com/serviceplane/serviceplane/runner"
)

func ExampleRunner() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	r, err := runner.New(runner.Options{}, func(context.Context) (next time.Time, err error) {
		fmt.Println("programmed")
		return time.Time{}, nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	if err := r.Sync(ctx); err != nil {
		fmt.Println(err)
	}
	stop()
	fmt.Println(<-done)
	// Output:
	// programmed
	// <nil>
}

// Requests before a run starts coalesce, including those before Run.
func ExampleRunner_Trigger() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	r, err := runner.New(runner.Options{}, func(context.Context) (next time.Time, err error) {
		fmt.Println("programmed")
		stop()
		return time.Time{}, nil
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 1000 {
		r.Trigger()
	}
	fmt.Println(r.Run(ctx))
	// Output:
	// programmed
	// <nil>
}

// All invalid fields are reported at once, one per line.
func ExampleOptions_Validate() {
	fmt.Println(runner.Options{
		MinInterval: time.Minute,
		MaxInterval: time.Second,
		Retry:       runner.Backoff{Factor: 0.5},
	}.Validate())
	// Output:
	// MaxInterval: 1s is shorter than MinInterval 1m0s
	// Retry.Factor: 0.5 is below 1
}
