// Quickstart demonstrates serviceplane: it builds a small cluster of network namespaces in
// its own process, programs the cluster's Services, and sends real connections through them.
//
//	go run ./examples/quickstart           # as root: the demonstration
//	go run ./examples/quickstart -plan     # what would be programmed
//	go run ./examples/quickstart -f DIR    # with your own Services and EndpointSlices
//	go run ./examples/quickstart -mode iptables
//	go run ./examples/quickstart -mode ipvs        # on a kernel with IPVS
//	go run ./examples/quickstart -mode ebpf        # TCP sockets before the rules
//	go run ./examples/quickstart -mode userspace   # any user, any system
//
// It leaves nothing: the namespaces have no names and end with the process.
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

	"github.com/serviceplane/serviceplane/examples/manifests"
)

// embedded holds the Services that are used without -f.
//
//go:embed cluster/*.yaml
var embedded embed.FS

// errCannotShow is the error without the privilege or the system to build the cluster.
var errCannotShow = errors.New("needs root on Linux")

func main() {
	dir := flag.String("f", "", "`directory` with YAML or JSON files of Services and EndpointSlices, instead of the embedded ones")
	planOnly := flag.Bool("plan", false, "print what would be programmed, and change nothing")
	engine := modeNFTables
	flag.Var(&engine, "mode", "`engine`: nftables, iptables, ipvs, ebpf, or userspace, which needs no privilege")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, options{*planOnly, engine}); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		stop()
		os.Exit(1)
	}
}

// options holds the flags about the engine.
type options struct {
	planOnly bool
	mode     mode
}

func run(ctx context.Context, out io.Writer, dir string, o options) error {
	source, err := folder(dir)
	if err != nil {
		return err
	}
	read, err := manifests.Read(source)
	if err != nil {
		return fmt.Errorf("load manifests of %s: %w", cmp.Or(dir, "the quickstart"), err)
	}
	objects := objects(read)
	if o.mode == modeUserspace {
		if o.planOnly {
			return errors.New("-plan: the userspace engine programs nothing")
		}
		return showSockets(ctx, out, objects)
	}
	if o.planOnly {
		return plan(ctx, out, objects, o.mode)
	}
	err = show(ctx, out, objects, o.mode)
	if !errors.Is(err, errCannotShow) {
		return err
	}
	if _, err := fmt.Fprintf(out, "No demonstration: %v.\nThis is what would be programmed.\n\n", err); err != nil {
		return err
	}
	return plan(ctx, out, objects, o.mode)
}

// folder returns the directory of the files.
func folder(dir string) (fs.FS, error) {
	if dir != "" {
		return os.DirFS(dir), nil
	}
	return fs.Sub(embedded, "cluster")
}
