package spctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
)

// NodeProxy is the proxy of one node, of those that Options.Nodes lists.
type NodeProxy struct {
	// Name is the node's name, for --node and for what is printed.
	Name string
	// Address is the URL of its debughttp.Handler, as for --address.
	Address string
	// Client sends the requests; default is Options.Client.
	Client *http.Client
	// Err is why the node cannot be asked. Others are asked nevertheless.
	Err error
}

// sides returns the proxies that a command compares: the one at --address, or the proxies of
// the nodes that --node names, or of all nodes.
func (a *app) sides(ctx context.Context) ([]NodeProxy, error) {
	if a.options.Nodes == nil {
		return []NodeProxy{{Name: a.address, Address: a.address}}, nil
	}
	all, err := a.options.Nodes(ctx)
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	chosen := slices.SortedStableFunc(slices.Values(all), func(a, b NodeProxy) int { return strings.Compare(a.Name, b.Name) })
	if len(a.nodes) > 0 {
		chosen = slices.DeleteFunc(chosen, func(n NodeProxy) bool { return !slices.Contains(a.nodes, n.Name) })
	}
	if len(chosen) < max(1, len(a.nodes)) {
		return nil, fmt.Errorf("of the nodes %q, these have a proxy: %s", a.nodes, list(names(chosen)))
	}
	return chosen, nil
}

func names(nodes []NodeProxy) (names []string) {
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return names
}

// one returns the proxy that a command asks, which compares nothing.
func (a *app) one(ctx context.Context) (*proxy, error) {
	sides, err := a.sides(ctx)
	if err != nil {
		return nil, err
	}
	if len(sides) > 1 {
		return nil, errors.New("name one node with --node")
	}
	return a.connectTo(&sides[0])
}

func (a *app) connectTo(n *NodeProxy) (*proxy, error) {
	if n.Err != nil {
		return nil, fmt.Errorf("ask %s: %w", n.Name, n.Err)
	}
	p, err := a.connect(n.Address)
	if err != nil {
		return nil, err
	}
	if p.name = n.Name; n.Client != nil {
		p.client = n.Client
	}
	return p, nil
}

// response is what one proxy answered.
type response struct {
	Node   string          `json:"node"`
	Error  string          `json:"error,omitempty"`
	Answer json.RawMessage `json:"answer,omitempty"`

	err error
}

// ask sends a GET to all proxies. A failure is in the response.
func (a *app) ask(ctx context.Context, sides []NodeProxy, path string, query url.Values) []response {
	const atOnce = 16
	all := make([]response, len(sides))
	var running errgroup.Group
	running.SetLimit(atOnce)
	for i := range sides {
		running.Go(func() error {
			r := &all[i]
			r.Node = sides[i].Name
			p, err := a.connectTo(&sides[i])
			if err == nil {
				r.Answer, err = a.fetch(ctx, p, path, query)
			}
			if r.err = err; err != nil {
				r.Error = err.Error()
			}
			return nil
		})
	}
	_ = running.Wait() // errors are in the responses
	return all
}

// perNode asks one proxy, or several nodes whose answers it shows side by side. check, if it is
// not nil, judges each answer.
func (a *app) perNode(c *cobra.Command, path string, query url.Values, table func(*printer, []response) error, check func(json.RawMessage) error) error {
	sides, err := a.sides(c.Context())
	if err != nil {
		return err
	}
	all := a.ask(c.Context(), sides, path, query)
	for i := range all {
		if check == nil || all[i].err != nil {
			continue
		}
		if err := check(all[i].Answer); err != nil {
			return err
		}
	}
	return a.showNodes(c, all, table)
}

// showNodes prints the answers of one proxy, or those of several nodes side by side.
func (a *app) showNodes(c *cobra.Command, all []response, table func(*printer, []response) error) error {
	answered := slices.DeleteFunc(slices.Clone(all), func(r response) bool { return r.err != nil })
	if a.options.Nodes == nil {
		if err := all[0].err; err != nil {
			return err
		}
		return a.print(c, all[0].Answer, func(w *printer) error { return table(w, answered) })
	}
	content, err := json.Marshal(struct {
		Nodes []response `json:"nodes"`
	}{all})
	if err != nil {
		return fmt.Errorf("print answers: %w", err)
	}
	err = a.print(c, content, func(w *printer) error {
		if err := table(w, answered); err != nil {
			return err
		}
		w.unreachable(all)
		return nil
	})
	return errors.Join(err, unanswered(all))
}

// unanswered is an error if a node did not answer. The table names these nodes.
func unanswered(all []response) error {
	if slices.ContainsFunc(all, func(r response) bool { return r.err != nil }) {
		return errors.New("not all nodes answered")
	}
	return nil
}

// unreachable prints the nodes that did not answer.
func (w *printer) unreachable(all []response) {
	failed := slices.DeleteFunc(slices.Clone(all), func(r response) bool { return r.err == nil })
	if len(failed) > 0 {
		w.section("Nodes that did not answer:")
	}
	rows(w, "NODE ERROR", failed, func(r response) []string { return []string{r.Node, r.Error} })
}

// summed returns a list of names that stays short.
func summed(names []string) string {
	const most = 4
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
