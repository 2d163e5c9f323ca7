// Nodeproxy is a Service proxy that can replace kube-proxy: it has
// kube-proxy's flags, ports, metrics and names in the kernel.
//
//	nodeproxy --kubeconfig FILE --cluster-cidr 10.244.0.0/16
//	nodeproxy --manifests DIR             # without an API server
//	nodeproxy --manifests DIR --instance edge --nftables-masquerade-bit 15 \
//	        --healthz-bind-address '' --metrics-bind-address ''   # beside another one
//	nodeproxy --cleanup
//
// Called by the name spctl, it is that command line, for the nodeproxy that runs on the node.
//
// It ends on SIGTERM or SIGINT. The rules stay, as with kube-proxy; --cleanup removes them.
// Package nodeproxy is all of it, for other programs.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	"k8s.io/klog/v2"

	"github.com/serviceplane/serviceplane/node/nodeproxy"
	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	command, status := nodeproxy.New(nodeproxy.Options{OwnsProcess: true, Logging: logClientGo}), func(error) int { return 1 }
	if filepath.Base(os.Args[0]) == "spctl" { // a link in the image
		command, status = spctl.New(spctl.Options{}), spctl.ExitStatus
	}
	err := command.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, command.Name()+":", err)
		os.Exit(status(err))
	}
}

// logClientGo sends client-go's logs to the log. klog's logger is global: only a program may set it, before
// anything else runs.
func logClientGo(log *zap.Logger) {
	log = log.Named("client-go").WithOptions(zap.IncreaseLevel(zap.InfoLevel))
	klog.SetLoggerWithOptions(zapr.NewLogger(log), klog.ContextualLogger(true))
}
