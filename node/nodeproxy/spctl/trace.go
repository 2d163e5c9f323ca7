package spctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/serviceplane/serviceplane/internal/answers"
)

// tracing are the flags of trace.
type tracing struct {
	packet

	timeout time.Duration
	packets int
	send    bool
	netns   string
}

func (t *tracing) register(f *pflag.FlagSet) {
	t.packet.register(f)
	f.DurationVar(&t.timeout, "timeout", 0, "how long to wait for the packet; 0 for the proxy's default")
	f.IntVar(&t.packets, "packets", 0, "how many packets to follow at most; 0 for the proxy's default")
	f.BoolVar(&t.send, "send", false, "send the packet: a TCP SYN, or a UDP datagram")
	f.StringVar(&t.netns, "netns", "", "network namespace to send from; default is the node's")
}

// query returns the parameters of trace.
func (t *tracing) query(ctx context.Context, a *app, to *proxy) (url.Values, error) {
	query, err := t.packet.query(ctx, a, to)
	if err != nil {
		return nil, err
	}
	query.Set("send", strconv.FormatBool(t.send))
	if t.timeout != 0 {
		query.Set("timeout", t.timeout.String())
	}
	if t.packets != 0 {
		query.Set("packets", strconv.Itoa(t.packets))
	}
	if t.netns != "" {
		query.Set("netns", t.netns)
	}
	return query, nil
}

func (a *app) trace() *cobra.Command {
	var t tracing
	c := &cobra.Command{
		Use:   "trace" + packetUse,
		Short: "Follow one real packet through the tables of the node, and compare with explain",
		Long: "Follow the first packet of a connection through all tables and chains of the node, also those of other programs, and compare with explain. " +
			"It waits for such a packet, or sends one itself. The exit status is 1 if the node does something else than explain says, and 2 if no packet was followed.",
		Example: "trace 10.244.0.1 10.96.0.10:80 --send\ntrace 10.244.0.1 10.96.0.10:80/UDP --timeout 1m",
		RunE:    func(c *cobra.Command, args []string) error { return a.follows(c, &t, args) },
	}
	t.register(c.Flags())
	return c
}

// follows asks for a trace and prints it.
func (a *app) follows(c *cobra.Command, t *tracing, args []string) error {
	if err := t.parse(args); err != nil {
		return err
	}
	to, err := a.one(c.Context())
	if err != nil {
		return err
	}
	query, err := t.query(c.Context(), a, to)
	if err != nil {
		return err
	}
	if !t.send {
		if err := to.traces(c.Context()); err != nil {
			return err
		}
		_, _ = fmt.Fprintln(c.ErrOrStderr(), "waiting for such a packet") // for people
	}
	ctx, stop := a.limited(c.Context(), t.timeout)
	defer stop()
	content, err := to.send(ctx, http.MethodPost, "trace", query)
	if err != nil {
		return err
	}
	answer, err := decode[answers.Trace](content)
	if err != nil {
		return err
	}
	err = a.print(c, content, func(w *printer) error { return w.trace(&answer) })
	if err != nil {
		return err
	}
	return traceResult(&answer)
}

// traces returns nil if the proxy has the page trace, which answers a GET only with the method that it wants.
func (p *proxy) traces(ctx context.Context) error {
	_, err := p.get(ctx, "trace", nil)
	if refused, ok := errors.AsType[*refusedError](err); ok && refused.status == http.StatusMethodNotAllowed {
		return nil
	}
	return err
}

// unseen is the verdict of a trace without a packet.
const unseen = "unseen"

// traceResult is what the exit status says.
func traceResult(t *answers.Trace) error {
	switch {
	case t.Agrees:
		return nil
	case t.Verdict == unseen && t.Sent != "":
		return fmt.Errorf("no packet was followed; the result of sending one: %s", t.Sent)
	case t.Verdict == unseen:
		return errors.New("no packet was followed: none came in time; see --timeout, or --send one")
	default:
		return fmt.Errorf("%w: the packet does not go as explained", ErrDifferent)
	}
}

func (w *printer) trace(t *answers.Trace) error {
	agrees := "yes"
	if !t.Agrees {
		agrees = "no, it says: " + t.Explain.Verdict
	}
	w.fields("Packet", packetText(&t.Explain.Packet), "Sent", t.Sent, "Verdict", t.Verdict, "By", t.By, "As explained", agrees)
	for _, reason := range t.Reasons {
		w.line("  " + oneLine(reason))
	}
	if len(t.Steps) == 0 {
		return nil
	}
	w.section("Steps:")
	w.line("TABLE\tCHAIN\tHOOK\tOURS\tVERDICT\tRULE")
	for i := range t.Steps {
		s := &t.Steps[i]
		w.row(s.Family+" "+s.Table, s.Chain, s.Hook, yesNo(s.Ours), s.Verdict, strings.TrimSpace(cmp.Or(s.Rule, "policy")+" "+quoted(s.Comment)+whole(s.Command, s.Handle)))
	}
	return nil
}

// quoted is the comment of a rule, as nft has it.
func quoted(comment string) string {
	if comment == "" {
		return ""
	}
	return "comment " + strconv.Quote(comment)
}

// whole says how to see a rule of which a part is only a name.
func whole(command string, handle uint64) string {
	if command == "" {
		return ""
	}
	return fmt.Sprintf(" # whole: %s, handle %d", command, handle)
}

// port is the name of a counted port.
func port(name, protocol string) string {
	if name == "" {
		return protocol
	}
	return name + "/" + protocol
}
