// Spctl shows what a running Service proxy programs, and why.
//
//	spctl services
//	spctl explain 10.244.0.1 10.96.0.10:80
//
// Package spctl documents the subcommands and the exit status.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/serviceplane/serviceplane/spctl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := spctl.New(spctl.Options{}).ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "spctl:", err)
	}
	os.Exit(spctl.ExitStatus(err))
}
