// Spctl shows what a running Service proxy programs, and why.
//
//	spctl services
//	spctl explain 10.244.0.1 10.96.0.10:80
//
// Under the name kubectl-serviceplane it is a plugin of kubectl, which asks the proxies of all
// nodes:
//
//	kubectl serviceplane status
//	kubectl serviceplane diff
//
// Package spctl documents the subcommands and the exit status.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	command := commandFor(os.Args[0])
	err := command.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, command.DisplayName()+":", err)
	}
	os.Exit(spctl.ExitStatus(err))
}

// commandFor returns the command for the name of the program.
func commandFor(program string) *cobra.Command {
	if strings.HasPrefix(filepath.Base(program), "kubectl-") {
		return plugin()
	}
	return spctl.New(spctl.Options{})
}
