// Quickstart shows serviceplane at work: it builds a small cluster out of network
// namespaces in its own process, programs the cluster's Services with the nftables
// engine, and sends real connections through them.
//
//	go run ./examples/quickstart           # as root: the show
//	go run ./examples/quickstart -plan     # what would be programmed
//	go run ./examples/quickstart -f DIR    # with your own Services and EndpointSlices
//
// Nothing is left behind: the namespaces have no names and end with the process.
package main

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"
)

// embedded holds the Services to show when there are no others.
//
//go:embed cluster/*.yaml
var embedded embed.FS

// errCannotShow says that this process may not, or this system cannot, build the
// cluster.
var errCannotShow = errors.New("needs root on Linux")

func main() {
	dir := flag.String("f", "", "`directory` with YAML or JSON files of Services and EndpointSlices, instead of the embedded ones")
	planOnly := flag.Bool("plan", false, "print what would be programmed, and touch nothing")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *planOnly); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, dir string, planOnly bool) error {
	source, err := manifests(dir)
	if err != nil {
		return err
	}
	objects, err := load(source)
	if err != nil {
		return fmt.Errorf("load manifests of %s: %w", cmp.Or(dir, "the quickstart"), err)
	}
	if planOnly {
		return plan(ctx, out, objects)
	}
	err = show(ctx, out, objects)
	if !errors.Is(err, errCannotShow) {
		return err
	}
	if _, err := fmt.Fprintf(out, "No show: %v.\nThis is what would be programmed instead.\n\n", err); err != nil {
		return err
	}
	return plan(ctx, out, objects)
}

// manifests is where the files are.
func manifests(dir string) (fs.FS, error) {
	if dir != "" {
		return os.DirFS(dir), nil
	}
	return fs.Sub(embedded, "cluster")
}
