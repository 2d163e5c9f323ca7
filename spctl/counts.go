package spctl

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
)

// countsAnswer is debughttp's counts.
type countsAnswer struct {
	Since        time.Time `json:"since"`
	Total        int       `json:"total"`
	ServicePorts []struct {
		service
		servicePort
		traffic

		Endpoints []struct {
			traffic

			Address string `json:"address"`
		} `json:"endpoints"`
	} `json:"servicePorts"`
}

// traffic is what was counted. Bytes and Packets are nil if they are unknown.
type traffic struct {
	Connections uint64  `json:"connections"`
	Bytes       *uint64 `json:"bytes"`
	Packets     *uint64 `json:"packets"`
}

func (t *traffic) cells() []string {
	return []string{fmt.Sprint(t.Connections), number(t.Packets), number(t.Bytes)}
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
	answer, err := decode[countsAnswer](content)
	if err != nil {
		return err
	}
	if !answer.Since.IsZero() {
		w.fields("Since", answer.Since.Format(time.RFC3339))
	}
	var table [][]string
	for i := range answer.ServicePorts {
		p := &answer.ServicePorts[i]
		name := []string{p.Namespace, p.Name, p.port(), p.Family}
		table = append(table, slices.Concat(name, []string{"all"}, p.cells()))
		for j := range p.Endpoints {
			e := &p.Endpoints[j]
			table = append(table, slices.Concat(name, []string{e.Address}, e.cells()))
		}
	}
	rows(w, "NAMESPACE NAME PORT FAMILY ENDPOINT CONNECTIONS PACKETS BYTES", table, func(cells []string) []string { return cells })
	if n := answer.Total - len(answer.ServicePorts); n > 0 {
		w.line(fmt.Sprintf("and %d more service ports; see --limit", n))
	}
	if len(table) == 0 {
		w.line("nothing was counted")
	}
	return nil
}
