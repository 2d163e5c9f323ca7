package spctl

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// DefaultAddress is where nodeproxy listens for root.
const DefaultAddress = "unix:///run/serviceplane/debug.sock"

// The exit statuses of a program, as [ExitStatus] returns them.
const (
	// StatusDifferent means that the command did its work and found differences.
	StatusDifferent = 1
	// StatusFailed means that the command could not do its work.
	StatusFailed = 2
)

// ErrDifferent is the error of a command that compares and found differences. It has
// printed them.
var ErrDifferent = errors.New("there are differences")

// ExitStatus returns the exit status of a program for the error of its command: 0 for
// nil, StatusDifferent for ErrDifferent, and StatusFailed for others.
func ExitStatus(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, ErrDifferent):
		return StatusDifferent
	default:
		return StatusFailed
	}
}

// Options are the options of New. The zero value is that of the program spctl.
type Options struct {
	// Use is the name of the command; default is spctl.
	Use string
	// Address is the default of --address; default is DefaultAddress.
	Address string
	// Client sends the requests; default is one without a proxy or a timeout of its own.
	// Addresses that begin with unix: do not use it.
	Client *http.Client
	// Nodes lists the proxies of several nodes. If it is set, --node takes the place of
	// --address: services, status, verify and diff show all nodes side by side, unless it names some;
	// the other subcommands ask the one that it names. There is no trace, which changes a node. It is called once for each command, and
	// now and then by wait.
	Nodes func(ctx context.Context) ([]NodeProxy, error)
	// Awaited returns the names of the nodes that wait waits for, such as those that count by
	// programmed.NodePolicy, unless --node names some. One that Nodes does not have cannot be asked,
	// so the wait fails and names it. Nil means the nodes of Nodes: then a node whose proxy is just
	// being replaced is not waited for, although it still has its rules.
	Awaited func(ctx context.Context) ([]string, error)
	// Versions returns the resourceVersion of a Service and the newest one of its EndpointSlices,
	// for wait without --services and --endpointslices. Without Versions, one of them is needed.
	Versions func(ctx context.Context, namespace, name string) (services, endpointSlices string, err error)
}

// app is one command with its flags.
type app struct {
	options Options
	address string
	nodes   []string
	output  format
	timeout time.Duration
}

// New returns a command with the subcommands that the package documents. Commands share
// nothing. The caller executes it, with a context that ends when the user interrupts, and
// prints its error, which cobra does not: see ExitStatus.
func New(options Options) *cobra.Command {
	const timeout = 30 * time.Second
	options.Use = cmp.Or(options.Use, "spctl")
	options.Address = cmp.Or(options.Address, DefaultAddress)
	a := &app{options: options, output: asTable}
	command := &cobra.Command{
		Use:           options.Use,
		Short:         "Show what a running Service proxy programs, and why",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	flags := command.PersistentFlags()
	if options.Nodes == nil {
		command.AddCommand(a.trace()) // proxies offer it at their sockets only
		flags.StringVar(&a.address, "address", options.Address, "where the proxy listens: http://HOST:PORT, or unix:///PATH for a socket")
	} else {
		flags.StringSliceVar(&a.nodes, "node", nil, "names of nodes; default is all, where a command shows several")
	}
	flags.VarP(&a.output, "output", "o", "table, json or yaml")
	flags.DurationVar(&a.timeout, "request-timeout", timeout, "how long one request may take; 0 for no limit")
	must(command.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats(), cobra.ShellCompDirectiveNoFileComp)))
	command.AddCommand(a.services(), a.get(), a.explain(), a.status(), a.syncs(), a.watch(), a.state(), a.diff(), a.verify(), a.rules(), a.wait(), a.counts())
	completeExamples(command)
	return command
}

// completeExamples begins each line of an example with the name of command. Only the help knows the name: another
// command may have this one as a subcommand.
func completeExamples(command *cobra.Command) {
	command.SetHelpFunc(func(c *cobra.Command, args []string) {
		help := (&cobra.Command{}).HelpFunc() // cobra's
		if parent := command.Parent(); parent != nil {
			help = parent.HelpFunc()
		}
		if lines := c.Example; lines != "" {
			begin := command.CommandPath() + " "
			c.Example = begin + strings.ReplaceAll(lines, "\n", "\n"+begin)
			defer func() { c.Example = lines }()
		}
		help(c, args)
	})
}

// plain returns a command without arguments; long may be empty.
func plain(use, short, long string, run func(c *cobra.Command) error) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long,
		Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error { return run(c) },
	}
}

// must panics if the package declares its own flags wrongly.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// limited returns a context for one request, which may take longer by extra.
func (a *app) limited(ctx context.Context, extra time.Duration) (context.Context, context.CancelFunc) {
	if a.timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, a.timeout+extra)
}
