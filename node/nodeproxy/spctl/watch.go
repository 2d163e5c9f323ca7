package spctl

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

// watching is the type of the events that only show that the proxy is there.
const watching = "watching"

func (a *app) watch() *cobra.Command {
	var most int
	c := &cobra.Command{
		Use:               "watch [NAMESPACE/NAME]",
		Short:             "Print changes as they are programmed, until interrupted",
		Long:              "Print a line for each change of a programmed service port, until interrupted. With --output=json each is one line of JSON, with yaml a document.",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeServices,
	}
	c.Flags().IntVar(&most, "count", 0, "end after so many changes; 0 for no end")
	c.RunE = func(c *cobra.Command, args []string) error {
		only := ""
		if len(args) > 0 {
			query, err := serviceQuery(args[0])
			if err != nil {
				return err
			}
			only = query.Get("namespace") + "/" + query.Get("name")
		}
		p, err := a.one(c.Context())
		if err != nil {
			return err
		}
		body, err := p.request(c.Context(), http.MethodGet, "watch", url.Values{})
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		return a.follow(c, body, only, most)
	}
	return c
}

// follow prints events until there were enough. An interrupt is the usual end.
func (a *app) follow(c *cobra.Command, body io.Reader, only string, most int) error {
	lines := bufio.NewReader(body)
	said := false
	for printed := 0; most == 0 || printed < most; {
		line, err := lines.ReadBytes('\n')
		switch {
		case errors.Is(c.Context().Err(), context.Canceled):
			return nil
		case errors.Is(err, io.EOF):
			return errors.New("the watch ended: the proxy stopped; start again when it runs")
		case err != nil:
			return fmt.Errorf("watch: %w", err)
		}
		event, err := decode[answers.Event](line)
		if err != nil {
			return err
		}
		if event.Type == watching && !said {
			said = true
			_, _ = fmt.Fprintln(c.ErrOrStderr(), "watching until interrupted") // for people
		}
		if event.Type == watching || only != "" && event.Namespace+"/"+event.Name != only {
			continue
		}
		printed++
		if err := a.printEvent(c.OutOrStdout(), line, &event); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) printEvent(w io.Writer, line json.RawMessage, event *answers.Event) (err error) {
	switch a.output {
	case asJSON:
		_, err = w.Write(line)
	case asYAML:
		if _, err = io.WriteString(w, "---\n"); err == nil {
			err = writeYAML(w, line)
		}
	case asTable:
		_, err = fmt.Fprintln(w, oneLine(eventText(event)))
	}
	if err != nil {
		return fmt.Errorf("print change: %w", err)
	}
	return nil
}

// eventText returns a line: the time by the proxy's clock, what changed and how.
func eventText(e *answers.Event) string {
	p := e.ServicePort
	if p == nil {
		p = &answers.ServicePort{}
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%s %s %s/%s %s %s: %s endpoints", e.Time.Format(time.TimeOnly), e.Type, e.Namespace, e.Name, title(p), p.Family, endpoints(p))
	for _, added := range e.EndpointsAdded {
		fmt.Fprintf(&text, ", +%s (%s)", added.Address, added.State)
	}
	if len(e.EndpointsRemoved) > 0 {
		text.WriteString(", -" + strings.Join(e.EndpointsRemoved, ", -"))
	}
	return text.String()
}
