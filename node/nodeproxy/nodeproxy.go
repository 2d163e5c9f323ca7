// Package nodeproxy is a whole Service proxy as a part of another program, for distributions, agents and
// CNI plugins that want kube-proxy's command, flags, configuration file, ports and metrics in a process of
// their own. Who brings informers and servers of its own takes an engine instead, such as package
// nftables.
//
// [New] returns a command for a program's own command line. [Run] runs the proxy with a
// KubeProxyConfiguration. Neither handles signals, ends the process or has global state: several proxies
// can run in one process, with different --instance, --state-dir, ports and masquerade bits. The modes
// are nftables, iptables, ipvs, ebpf and userspace.
package nodeproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap"
)

// Options say what the program is that has the proxy. The zero value is for a program with more parts.
type Options struct {
	// Use is the name of the command; default is nodeproxy.
	Use string
	// Configuration is a KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1), as YAML or JSON: what
	// --config reads, which overrides it as a whole. Other flags override its fields.
	Configuration []byte
	// Logger gets the logs; then -v and --logging-format have no effect. Nil means stderr.
	Logger *zap.Logger
	// Logging is called with the logger before anything runs, for a program that gives it to others, such as klog.
	Logging func(*zap.Logger)
	// OwnsProcess says that the proxy is the only part of its process. Then it sets the OOM score also if nobody asks
	// for it, as kube-proxy does, and returns memory to the system after the first sync.
	OwnsProcess bool
}

// New returns the command of the proxy, or a subcommand for another one. It runs until its context ends,
// with all goroutines; the rules stay. Its error names all flags and fields that are wrong. A command can
// be executed once.
func New(program Options) *cobra.Command {
	o := &options{program: program}
	errs := &faults{}
	command := &cobra.Command{
		Use:           cmp.Or(program.Use, "nodeproxy"),
		Version:       version(),
		Short:         "A Service proxy that can replace kube-proxy",
		SilenceErrors: true,
		SilenceUsage:  true,
		// All errors are reported together: package pflag stops at the first one.
		DisableFlagParsing: true,
	}
	command.Flags().SetNormalizeFunc(wordSeparators)
	o.register(command.Flags())
	command.InitDefaultHelpFlag()
	command.InitDefaultVersionFlag()
	errs.tolerate(command.Flags())
	command.RunE = func(command *cobra.Command, args []string) error {
		flags := command.Flags()
		flags.AddFlagSet(command.InheritedFlags())
		if err := flags.Parse(errs.known(flags, args)); err != nil {
			return fmt.Errorf("bad command line:\n%w", err)
		}
		switch {
		case isSet(flags, "help"):
			return pflag.ErrHelp // cobra prints it
		case isSet(flags, "version"):
			_, err := fmt.Fprintf(command.OutOrStdout(), "%s version %s\n", command.DisplayName(), command.Version)
			return err
		}
		if err := o.read(flags, errs); err != nil {
			return fmt.Errorf("bad command line:\n%w", err)
		}
		return o.perform(command.Context())
	}
	return command
}

// Run runs the proxy until ctx ends. args are flags, as for New.
func Run(ctx context.Context, program Options, args ...string) error {
	command := New(program)
	command.SetArgs(args)
	return command.ExecuteContext(ctx)
}

func isSet(flags *pflag.FlagSet, name string) bool {
	set, err := flags.GetBool(name)
	return err == nil && set
}

// read reads the configuration, completes the options and returns all that is wrong.
func (o *options) read(flags *pflag.FlagSet, errs *faults) error {
	for _, arg := range flags.Args() {
		errs.add("%s: want flags only", arg)
	}
	var err error
	if o.ignored, err = o.readFields(flags); err != nil {
		errs.add("%w", err)
	}
	o.complete(flags)
	if err = errors.Join(errors.Join(*errs...), located(o.Validate(), o.origins)); err != nil {
		return err
	}
	o.flags = flagValues(flags)
	return nil
}

// perform does what the flags say.
func (o *options) perform(ctx context.Context) error {
	if o.kubeProxy.writeConfigTo != "" {
		return o.writeConfig()
	}
	log := o.program.Logger
	if log == nil {
		log = newLogger(o.verbosity, o.kubeProxy.logFormat)
	}
	if o.program.Logging != nil {
		o.program.Logging(log)
	}
	return run(ctx, o, log)
}
