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
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/go-logr/zapr"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/serviceplane/serviceplane/spctl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	name, status, run := "nodeproxy", failed, func() error { return execute(ctx, os.Args[1:], os.Stdout) }
	if filepath.Base(os.Args[0]) == "spctl" { // a link in the image
		name, status, run = "spctl", spctl.ExitStatus, func() error { return spctl.New(spctl.Options{}).ExecuteContext(ctx) }
	}
	err := run()
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		os.Exit(status(err))
	}
}

func failed(error) int { return 1 }

// perform does what the flags say.
func (o *options) perform(ctx context.Context) error {
	if o.kubeProxy.writeConfigTo != "" {
		return o.writeConfig()
	}
	// klog's logger is global. Only a program may set it, before anything else runs.
	klog.SetLoggerWithOptions(zapr.NewLogger(newLogger(0, o.kubeProxy.logFormat).Named("client-go")), klog.ContextualLogger(true))
	return run(ctx, o)
}

// execute runs the program with its arguments until ctx ends. It prints the help to out.
func execute(ctx context.Context, args []string, out io.Writer) error {
	var o options
	command := &cobra.Command{
		Use:           "nodeproxy",
		Version:       version(), // adds --version
		Short:         "A Service proxy that can replace kube-proxy",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs, // reported together with bad flags
	}
	command.Flags().SetNormalizeFunc(wordSeparators)
	o.register(command.Flags())
	command.InitDefaultHelpFlag()
	command.InitDefaultVersionFlag()
	errs := &flagErrors{}
	errs.tolerate(command.Flags())
	command.RunE = func(_ *cobra.Command, rest []string) error {
		for _, arg := range rest {
			errs.add("%s: want flags only", arg)
		}
		if o.configFile != "" {
			var err error
			if o.ignored, err = o.readConfigFile(command.Flags()); err != nil {
				errs.add("--config=%s: %w", o.configFile, err)
			}
		}
		o.complete(command.Flags())
		if err := errors.Join(errs.join(), located(o.Validate(), o.origins)); err != nil {
			return fmt.Errorf("bad command line:\n%w", err)
		}
		o.flags = flagValues(command.Flags())
		return o.perform(ctx)
	}
	command.SetArgs(errs.known(command.Flags(), args))
	command.SetOut(out)
	return command.ExecuteContext(ctx)
}
