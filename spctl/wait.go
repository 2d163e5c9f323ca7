package spctl

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// programmedAnswer has the fields of debughttp's programmed that tables show.
type programmedAnswer struct {
	Programmed bool   `json:"programmed"`
	Missing    string `json:"missing"`
}

func (a *app) wait() *cobra.Command {
	const usualLimit, interval = 30 * time.Second, 200 * time.Millisecond
	var services, endpointSlices string
	var limit time.Duration
	c := &cobra.Command{
		Use:   "wait NAMESPACE/NAME",
		Short: "Wait until a change of a Service is programmed",
		Long: "Wait until a change of a Service, or of its EndpointSlices, is programmed: their metadata.resourceVersion after the change, or a later one. " +
			"The exit status is 1 if a proxy has not programmed it in time, and 2 if one does not answer.",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeServices,
	}
	c.Flags().StringVar(&services, "services", "", "resourceVersion of the Service")
	c.Flags().StringVar(&endpointSlices, "endpointslices", "", "newest resourceVersion of its EndpointSlices")
	c.Flags().DurationVar(&limit, "for", usualLimit, "how long to wait; 0 asks once")
	c.RunE = func(c *cobra.Command, args []string) error {
		query, err := serviceQuery(args[0])
		if err != nil {
			return err
		}
		if services == "" && endpointSlices == "" {
			if services, endpointSlices, err = a.versions(c.Context(), query); err != nil {
				return err
			}
		}
		query.Set("services", services)
		query.Set("endpointslices", endpointSlices)
		sides, err := a.sides(c.Context())
		if err != nil {
			return err
		}
		ctx, stop := context.WithTimeout(c.Context(), limit)
		defer stop()
		all := make([]response, len(sides))
		for behind := a.askBehind(c.Context(), sides, all, query); behind && ctx.Err() == nil; behind = a.askBehind(c.Context(), sides, all, query) {
			select {
			case <-time.After(interval):
			case <-ctx.Done():
			}
		}
		if err := c.Context().Err(); err != nil {
			return fmt.Errorf("wait: %w", err)
		}
		err = a.showNodes(c, all, func(w *printer, answers []response) error { return w.programmed(answers, a.options.Nodes != nil) })
		return worst([]error{err, judge(all)})
	}
	return c
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

// askBehind asks the proxies that have not programmed the change, and reports whether there still
// are some.
func (a *app) askBehind(ctx context.Context, sides []Node, all []response, query url.Values) (behind bool) {
	var ask []Node
	var at []int
	for i := range sides {
		if !hasChange(&all[i]) {
			ask, at = append(ask, sides[i]), append(at, i)
		}
	}
	for i, r := range a.ask(ctx, ask, "programmed", query) {
		all[at[i]] = r
		behind = behind || !hasChange(&r)
	}
	return behind
}

func hasChange(r *response) bool {
	answer, err := decode[programmedAnswer](r.Answer)
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
		answer, err := decode[programmedAnswer](all[i].Answer)
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

func (w *printer) programmed(answers []response, withNode bool) error {
	all, err := parts(answers, func(p *programmedAnswer) []programmedAnswer { return []programmedAnswer{*p} })
	if err != nil {
		return err
	}
	perNodeRows(w, "PROGRAMMED MISSING", all, withNode, func(p programmedAnswer) []string {
		return []string{yesNo(p.Programmed), strings.ReplaceAll(p.Missing, "\n", "; ")}
	})
	return nil
}
