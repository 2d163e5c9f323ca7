package spctl

import (
	"cmp"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// traceAnswer is debughttp's trace.
type traceAnswer struct {
	Steps []struct {
		Table   string `json:"table"`
		Family  string `json:"family"`
		Chain   string `json:"chain"`
		Hook    string `json:"hook"`
		Rule    string `json:"rule"`
		Comment string `json:"comment"`
		Verdict string `json:"verdict"`
		Ours    bool   `json:"ours"`
	} `json:"steps"`
	Verdict string        `json:"verdict"`
	By      string        `json:"by"`
	Reasons []string      `json:"reasons"`
	Sent    string        `json:"sent"`
	Explain explainAnswer `json:"explain"`
	Agrees  bool          `json:"agrees"`
}

func (a *app) trace() *cobra.Command {
	var p packet
	var timeout time.Duration
	var packets int
	var send bool
	var netns string
	c := &cobra.Command{
		Use:   "trace" + packetUse,
		Short: "Follow one real packet through the tables of the node, and compare with explain",
		Long: "Follow the first packet of a connection through all tables and chains of the node, also those of other programs, and compare with explain. " +
			"It waits for such a packet, or sends one itself. The exit status is 1 if the node does something else than explain says.",
		Example: "trace 10.244.0.1 10.96.0.10:80 --send\ntrace 10.244.0.1 10.96.0.10:80/UDP --timeout 1m",
	}
	p.register(c.Flags())
	c.Flags().DurationVar(&timeout, "timeout", 0, "how long to wait for the packet; 0 for the proxy's default")
	c.Flags().IntVar(&packets, "packets", 0, "how many packets to follow at most; 0 for the proxy's default")
	c.Flags().BoolVar(&send, "send", false, "send the packet: a TCP SYN, or a UDP datagram")
	c.Flags().StringVar(&netns, "netns", "", "network namespace to send from; default is the node's")
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := p.parse(args); err != nil {
			return err
		}
		to, err := a.one(c.Context())
		if err != nil {
			return err
		}
		query, err := p.query(c.Context(), a, to)
		if err != nil {
			return err
		}
		if timeout > 0 {
			query.Set("timeout", timeout.String())
		}
		if packets > 0 {
			query.Set("packets", strconv.Itoa(packets))
		}
		if query.Set("send", strconv.FormatBool(send)); netns != "" {
			query.Set("netns", netns)
		}
		ctx, stop := a.limited(c.Context(), timeout)
		defer stop()
		content, err := to.send(ctx, http.MethodPost, "trace", query)
		if err != nil {
			return err
		}
		answer, err := decode[traceAnswer](content)
		if err != nil {
			return err
		}
		err = a.print(c, content, func(w *printer) error { return w.trace(&answer) })
		if err == nil && !answer.Agrees {
			return ErrDifferent
		}
		return err
	}
	return c
}

func (w *printer) trace(t *traceAnswer) error {
	agrees := "yes"
	if !t.Agrees {
		agrees = "no, it says: " + t.Explain.Verdict
	}
	w.fields("Packet", t.Explain.Packet.String(), "Sent", t.Sent, "Verdict", t.Verdict, "By", t.By, "As explained", agrees)
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
		w.row(s.Family+" "+s.Table, s.Chain, s.Hook, yesNo(s.Ours), s.Verdict, strings.TrimSpace(cmp.Or(s.Rule, "policy")+" "+quoted(s.Comment)))
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

// port is the name of a counted port.
func (p *servicePort) port() string {
	if p.PortName == "" {
		return p.Protocol
	}
	return fmt.Sprintf("%s/%s", p.PortName, p.Protocol)
}
