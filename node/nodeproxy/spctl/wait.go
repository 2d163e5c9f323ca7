package spctl

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

func (a *app) wait() *cobra.Command {
	const usualLimit = 30 * time.Second
	var services, endpointSlices string
	var left []string
	var limit time.Duration
	c := &cobra.Command{
		Use:   "wait NAMESPACE/NAME",
		Short: "Wait until a change of a Service is programmed",
		Long: "Wait until a change of a Service, or of its EndpointSlices, is programmed: their metadata.resourceVersion after the change, or a later one. " +
			"With --left, until no node sends new connections to some endpoints. " +
			"The exit status is 1 if a proxy has not programmed it in time, and 2 if one does not answer. " + a.whoCounts(),
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeServices,
	}
	c.Flags().StringVar(&services, "services", "", "resourceVersion of the Service")
	c.Flags().StringVar(&endpointSlices, "endpointslices", "", "newest resourceVersion of its EndpointSlices")
	c.Flags().StringSliceVar(&left, "left", nil, "endpoints that must not get new connections any more, as ADDRESS or ADDRESS:PORT")
	c.Flags().DurationVar(&limit, "timeout", usualLimit, "how long to wait; 0 asks once")
	c.RunE = func(c *cobra.Command, args []string) error {
		query, err := serviceQuery(args[0])
		if err != nil {
			return err
		}
		if services == "" && endpointSlices == "" && len(left) == 0 {
			if services, endpointSlices, err = a.versions(c.Context(), query); err != nil {
				return err
			}
		}
		query.Set("services", services)
		query.Set("endpointslices", endpointSlices)
		query["endpoint"] = left
		all, err := a.untilAllHave(c.Context(), query, limit)
		if err != nil {
			return err
		}
		if err := c.Context().Err(); err != nil {
			return fmt.Errorf("wait: %w", err)
		}
		err = a.showNodes(c, all, func(w *printer, responses []response) error { return w.programmed(responses, a.options.Nodes != nil) })
		return worst([]error{err, judge(all)})
	}
	return c
}

// whoCounts says which proxies are waited for.
func (a *app) whoCounts() string {
	switch {
	case a.options.Nodes == nil:
		return "It asks one proxy."
	case a.options.Awaited == nil:
		return "It counts only nodes that have a proxy now: one whose proxy is being replaced still has its rules, and is not waited for."
	default:
		return "All nodes that count must have it: a node without a proxy now still has its rules, and is named."
	}
}

// versions are those of now.
func (a *app) versions(ctx context.Context, service url.Values) (services, endpointSlices string, err error) {
	if a.options.Versions == nil {
		return "", "", errors.New("nothing to wait for: give --services or --endpointslices the metadata.resourceVersion after the change")
	}
	services, endpointSlices, err = a.options.Versions(ctx, service.Get("namespace"), service.Get("name"))
	if err != nil {
		return "", "", fmt.Errorf("ask the API server for the versions of %s/%s: %w", service.Get("namespace"), service.Get("name"), err)
	}
	return services, endpointSlices, nil
}

// errNoProxy is why a node that is waited for cannot be asked.
var errNoProxy = errors.New("no proxy runs there now, but its kernel may still send connections: if it never has one, wait for other nodes only")

// awaited returns the proxies that must have a change. Those of nodes without one have an error.
func (a *app) awaited(ctx context.Context) ([]NodeProxy, error) {
	sides, err := a.sides(ctx)
	if err != nil || a.options.Awaited == nil || len(a.nodes) > 0 {
		return sides, err
	}
	names, err := a.options.Awaited(ctx)
	if err != nil {
		return nil, fmt.Errorf("list nodes that count: %w", err)
	}
	all := make([]NodeProxy, 0, len(names))
	for _, name := range names {
		chosen := NodeProxy{Name: name, Err: errNoProxy}
		for i := range sides {
			if sides[i].Name == name && chosen.Err != nil { // an update may have two on one node
				chosen = sides[i]
			}
		}
		all = append(all, chosen)
	}
	return all, nil
}

// untilAllHave asks until all have the change, or for so long, and returns the last answers. It lists
// the proxies again, because an update may replace them.
func (a *app) untilAllHave(ctx context.Context, query url.Values, limit time.Duration) (all []response, err error) {
	const interval, relist = 200 * time.Millisecond, 5 * time.Second
	limited, stop := context.WithTimeout(ctx, limit)
	defer stop()
	asking := limited
	if limit <= 0 {
		asking = ctx
	}
	var sides []NodeProxy
	var listed time.Time
	responses := map[string]response{}
	for behind := true; behind; {
		if now := time.Now(); sides == nil || now.Sub(listed) >= relist {
			again, err := a.awaited(ctx)
			if err != nil && sides == nil {
				return nil, err
			}
			if err == nil {
				sides = again
			}
			listed = now
		}
		if behind = a.askBehind(asking, sides, responses, query); !behind || limited.Err() != nil {
			break
		}
		select {
		case <-time.After(interval):
		case <-limited.Done():
		}
	}
	for i := range sides {
		all = append(all, responses[sides[i].Name])
	}
	return all, nil
}

// askBehind asks the proxies that have not programmed the change, and reports whether there still
// are some.
func (a *app) askBehind(ctx context.Context, sides []NodeProxy, responses map[string]response, query url.Values) (behind bool) {
	ask := slices.DeleteFunc(slices.Clone(sides), func(n NodeProxy) bool {
		answer := responses[n.Name]
		return hasChange(&answer)
	})
	for _, r := range a.ask(ctx, ask, "programmed", query) {
		if _, known := responses[r.Node]; ctx.Err() == nil || !known { // what the end of the wait cut short says nothing new
			responses[r.Node] = r
		}
		behind = behind || !hasChange(&r)
	}
	return behind
}

func hasChange(r *response) bool {
	answer, err := decode[answers.Change](r.Answer)
	return r.err == nil && err == nil && answer.Programmed
}

// judge returns ErrDifferent if a proxy has not programmed the change, and other errors for
// answers that do not tell.
func judge(all []response) error {
	var errs []error
	for i := range all {
		if all[i].err != nil {
			continue // showNodes tells
		}
		answer, err := decode[answers.Change](all[i].Answer)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", all[i].Node, err))
		case answer.Missing != "":
			errs = append(errs, ErrDifferent)
		case !answer.Programmed:
			errs = append(errs, fmt.Errorf("%s does not tell whether the change is programmed", all[i].Node))
		}
	}
	return worst(errs)
}

func (w *printer) programmed(responses []response, withNode bool) error {
	all, err := parts(responses, func(c *answers.Change) []answers.Change { return []answers.Change{*c} })
	if err != nil {
		return err
	}
	perNodeRows(w, "PROGRAMMED MISSING", all, withNode, func(c answers.Change) []string {
		return []string{yesNo(c.Programmed), strings.ReplaceAll(c.Missing, "\n", "; ")}
	})
	return nil
}
