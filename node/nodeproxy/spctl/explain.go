package spctl

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/serviceplane/serviceplane/internal/answers"
)

// packet is the first packet of a connection, as flags and arguments give it.
type packet struct{ protocol, source, destination, origin, iface string }

func (p *packet) register(f *pflag.FlagSet) {
	f.StringVar(&p.protocol, "protocol", "", "TCP, UDP or SCTP; default is TCP, or what follows the slash in DESTINATION")
	f.StringVar(&p.source, "from", "", "address of the client, instead of SOURCE")
	f.StringVar(&p.destination, "to", "", "address and port that the client connects to, instead of DESTINATION")
	f.StringVar(&p.origin, "origin", "", "pod (of this node), node or outside; default is what SOURCE is on the proxy's node")
	f.StringVar(&p.iface, "interface", "", "network interface that receives the packet")
}

// packetUse is how subcommands that take a packet are used.
const packetUse = " SOURCE DESTINATION[/PROTOCOL]"

// parse completes the flags with the arguments.
func (p *packet) parse(args []string) error {
	for _, value := range []*string{&p.source, &p.destination} {
		if *value == "" && len(args) > 0 {
			*value, args = args[0], args[1:]
		}
	}
	if p.source == "" || p.destination == "" || len(args) > 0 {
		return fmt.Errorf("want%s, as in 10.244.0.1 10.96.0.10:80/TCP", packetUse)
	}
	destination, protocol, _ := strings.Cut(p.destination, "/")
	p.destination, p.protocol = destination, strings.ToUpper(cmp.Or(p.protocol, protocol, "TCP"))
	return nil
}

// query returns the parameters of explain. Without --origin, it asks the proxy which
// addresses its node and pods have.
func (p *packet) query(ctx context.Context, a *app, to *proxy) (url.Values, error) {
	if p.origin == "" {
		content, err := a.fetch(ctx, to, "status", url.Values{"limit": {"1"}})
		if err != nil {
			return nil, err
		}
		status, err := decode[answers.Status](content)
		if err != nil {
			return nil, err
		}
		p.origin = originOf(&status.Node, p.source)
	}
	query := url.Values{"protocol": {p.protocol}, "source": {p.source}, "destination": {p.destination}, "origin": {p.origin}}
	if p.iface != "" {
		query.Set("interface", p.iface)
	}
	return query, nil
}

// originOf returns where the packets of an address come from, on this node.
func originOf(n *answers.Node, source string) string {
	addr, err := netip.ParseAddr(source)
	if err != nil {
		return "outside" // the proxy names the error
	}
	addr = addr.Unmap()
	if slices.Contains(n.Addresses, addr.String()) || addr.IsLoopback() {
		return "node"
	}
	for _, text := range n.PodCIDRs {
		if prefix, err := netip.ParsePrefix(text); err == nil && prefix.Contains(addr) {
			return "pod"
		}
	}
	return "outside"
}

func packetText(p *answers.Packet) string {
	text := fmt.Sprintf("%s %s to %s, origin %s", p.Protocol, p.Source, p.Destination, p.Origin)
	if p.Interface != "" {
		text += ", interface " + p.Interface
	}
	return text
}

func (a *app) explain() *cobra.Command {
	var p packet
	c := &cobra.Command{
		Use:     "explain" + packetUse,
		Short:   "Show the verdict on a packet, and the reasons",
		Long:    "Show what the programmed rules do with the first packet of a connection, and why each endpoint gets it or not.",
		Args:    cobra.ArbitraryArgs,
		Example: "explain 10.244.0.1 10.96.0.10:80\nexplain 10.244.0.1 10.96.0.10:53/UDP\nexplain --from 192.0.2.1 --to 198.51.100.1:443 --origin outside",
	}
	p.register(c.Flags())
	must(c.RegisterFlagCompletionFunc("protocol", cobra.FixedCompletions([]string{"TCP", "UDP", "SCTP"}, cobra.ShellCompDirectiveNoFileComp)))
	must(c.RegisterFlagCompletionFunc("origin", cobra.FixedCompletions([]string{"pod", "node", "outside"}, cobra.ShellCompDirectiveNoFileComp)))
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
		return a.show(c, "explain", query, (*printer).explain)
	}
	return c
}

func (w *printer) explain(content json.RawMessage) error {
	e, err := decode[answers.Explanation](content)
	if err != nil {
		return err
	}
	w.explained(&e)
	return nil
}

func (w *printer) explained(e *answers.Explanation) {
	fields := []string{"Packet", packetText(&e.Packet), "Verdict", e.Verdict}
	if e.BySocket {
		fields = append(fields, "Translated", "by the socket of the client, not by rules")
	}
	w.fields(fields...)
	for _, reason := range e.Reasons {
		w.line("  " + oneLine(reason))
	}
	if len(e.Endpoints) == 0 {
		return
	}
	w.section("Endpoints, from the view of this packet:")
	rows(w, "ENDPOINT STATE NODE ZONE CHOSEN MASQUERADE", e.Endpoints, func(endpoint answers.ExplainedEndpoint) []string {
		chosen := "may be"
		switch {
		case endpoint.Excluded != "":
			chosen = "no: " + endpoint.Excluded
		case e.Verdict != "forward":
			chosen = "no: the packet is not forwarded"
		}
		return []string{endpoint.Address, endpoint.State, place(&endpoint.Endpoint), endpoint.Zone, chosen, yesNo(endpoint.Masquerade)}
	})
}
