package spctl

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

func trafficCells(t *answers.Traffic) []string {
	return []string{number(t.Connections), number(t.PacketsIn), number(t.PacketsOut), number(t.BytesIn), number(t.BytesOut)}
}

func number(n *uint64) string {
	if n == nil {
		return ""
	}
	return fmt.Sprint(*n)
}

func (a *app) counts() *cobra.Command {
	var limit int
	c := &cobra.Command{
		Use:               "counts [NAMESPACE/NAME]",
		Short:             "Show connections, packets and bytes of service ports and endpoints",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeServices,
	}
	c.Flags().IntVar(&limit, "limit", 0, "how many service ports to show; 0 for the proxy's default")
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		query := url.Values{}
		if len(args) > 0 {
			if query, err = serviceQuery(args[0]); err != nil {
				return err
			}
		}
		if limit != 0 {
			query.Set("limit", strconv.Itoa(limit))
		}
		return a.show(c, "counts", query, (*printer).counts)
	}
	return c
}

func (w *printer) counts(content json.RawMessage) error {
	answer, err := decode[answers.Counts](content)
	if err != nil {
		return err
	}
	if !answer.Since.IsZero() {
		w.fields("Since", answer.Since.Format(time.RFC3339))
	}
	if answer.TrafficProblem != "" && answer.Traffic {
		w.fields("Traffic", answer.TrafficProblem)
	} else if answer.TrafficProblem != "" {
		w.fields("No traffic", answer.TrafficProblem)
	}
	if answer.TrafficLosses > 0 {
		w.fields("Losses", fmt.Sprintf("%d times; then some traffic is missing", answer.TrafficLosses))
	}
	var table [][]string
	for i := range answer.ServicePorts {
		p := &answer.ServicePorts[i]
		name := []string{p.Namespace, p.Name, port(p.PortName, p.Protocol), p.Family}
		table = append(table, slices.Concat(name, []string{"all"}, trafficCells(&p.Traffic)))
		for j := range p.Endpoints {
			e := &p.Endpoints[j]
			table = append(table, slices.Concat(name, []string{e.Address}, trafficCells(&e.Traffic)))
		}
	}
	rows(w, "NAMESPACE NAME PORT FAMILY ENDPOINT CONNECTIONS PACKETS-IN PACKETS-OUT BYTES-IN BYTES-OUT", table, func(cells []string) []string { return cells })
	if n := answer.Total - len(answer.ServicePorts); n > 0 {
		w.line(fmt.Sprintf("and %d more service ports; see --limit", n))
	}
	if len(table) == 0 {
		w.line("nothing was counted")
	}
	return nil
}
