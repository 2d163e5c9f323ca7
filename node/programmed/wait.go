package programmed

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// Waiting says whom Wait asks, and how.
type Waiting struct {
	// Nodes returns the names of the nodes that must have a ServiceChange. Wait calls it again before
	// each round, so that it does not wait for a node that is gone. Which nodes count is the
	// caller's policy: a node that is not ready may still send connections.
	Nodes func(ctx context.Context) ([]string, error)
	// Ask returns the NodeReport of a node, with at least what NodeReport.Missing needs for this ServiceChange: see
	// Client. Several calls run at once.
	Ask func(ctx context.Context, node string, c ServiceChange) (NodeReport, error)
	// Interval is the pause between two rounds; 0 means 100ms. AtOnce is how many nodes are asked at once; 0
	// means 50. Timeout is how long a node may take to answer; 0 means 5s.
	Interval, Timeout time.Duration
	AtOnce            int
	// MayBeNone says that there may be no node that must have a ServiceChange. Otherwise Wait waits for the
	// first one: no node counts if the caller's policy is wrong, too.
	MayBeNone bool
}

// BehindError names the nodes that did not have a ServiceChange when Wait ended.
type BehindError struct {
	// Nodes are the reasons, by node.
	Nodes map[string]error
	// Cause is why Wait did not go on, such as context.DeadlineExceeded.
	Cause error
}

// mostNamed is how many nodes a BehindError names.
const mostNamed = 10

// Error names the first nodes.
func (e *BehindError) Error() string {
	var lines []string
	for _, node := range slices.Sorted(maps.Keys(e.Nodes)) {
		if len(lines) == mostNamed {
			lines = append(lines, fmt.Sprintf("and %d more", len(e.Nodes)-mostNamed))
			break
		}
		lines = append(lines, fmt.Sprintf("node %s: %v", node, e.Nodes[node]))
	}
	return fmt.Sprintf("%d nodes have not programmed the change (%v): %s", len(e.Nodes), e.Cause, strings.Join(lines, "; "))
}

// Unwrap returns the Cause.
func (e *BehindError) Unwrap() error { return e.Cause }

// Wait returns nil when all nodes have programmed a ServiceChange. A node that has it is not asked
// again, but for a last round if ServiceChange.Left is set. When ctx ends first, the error is a *BehindError. Other errors are those of a ServiceChange
// that cannot be waited for.
func Wait(ctx context.Context, w Waiting, c ServiceChange) error {
	if err := c.Validate(); err != nil {
		return err
	}
	w.Interval, w.Timeout, w.AtOnce = cmp.Or(w.Interval, 100*time.Millisecond), cmp.Or(w.Timeout, 5*time.Second), cmp.Or(w.AtOnce, 50)
	a := asking{w: &w, change: c, have: map[string]bool{}, behind: map[string]error{}}
	for !a.step(ctx) {
		select {
		case <-time.After(w.Interval):
		case <-ctx.Done():
			return &BehindError{Nodes: a.behind, Cause: context.Cause(ctx)}
		}
	}
	return nil
}

// asking is a Wait.
type asking struct {
	w      *Waiting
	change ServiceChange
	have   map[string]bool // nodes that have the change
	behind map[string]error
}

// step asks the nodes that do not have the change yet. It reports whether all have it.
func (a *asking) step(ctx context.Context) bool {
	nodes, err := a.w.counting(ctx)
	if err != nil {
		if len(a.behind) == 0 {
			a.behind["?"] = fmt.Errorf("list nodes: %w", err)
		}
		return false
	}
	asked := slices.DeleteFunc(slices.Clone(nodes), func(n string) bool { return a.have[n] })
	a.ask(ctx, nodes, asked)
	if len(a.behind) == 0 && len(a.change.Left) > 0 && len(asked) < len(nodes) {
		a.ask(ctx, nodes, nodes) // one that did not send to an endpoint may do so again: all must say it at once
	}
	return len(a.behind) == 0
}

// ask asks some of the nodes.
func (a *asking) ask(ctx context.Context, nodes, asked []string) {
	before := a.behind
	a.behind = a.w.round(ctx, a.change, asked)
	for _, n := range nodes {
		a.have[n] = a.behind[n] == nil
	}
	if ctx.Err() != nil { // it cut the answers off: those before say more
		for n := range a.behind {
			a.behind[n] = cmp.Or(before[n], a.behind[n])
		}
	}
}

// counting lists the nodes that count.
func (w *Waiting) counting(ctx context.Context) ([]string, error) {
	nodes, err := w.Nodes(ctx)
	if err == nil && len(nodes) == 0 && !w.MayBeNone {
		err = errors.New("no node counts: what chooses the nodes matches none")
	}
	return nodes, err
}

// round asks nodes, and returns why some do not have the ServiceChange.
func (w *Waiting) round(ctx context.Context, c ServiceChange, nodes []string) (behind map[string]error) {
	var (
		mu     sync.Mutex // guards behind
		asking sync.WaitGroup
		slots  = make(chan struct{}, w.AtOnce)
	)
	behind = map[string]error{}
	for _, node := range nodes {
		slots <- struct{}{}
		asking.Go(func() {
			defer func() { <-slots }()
			if err := w.ask(ctx, c, node); err != nil {
				mu.Lock()
				defer mu.Unlock()
				behind[node] = err
			}
		})
	}
	asking.Wait()
	return behind
}

func (w *Waiting) ask(ctx context.Context, c ServiceChange, node string) error {
	ctx, stop := context.WithTimeout(ctx, w.Timeout)
	defer stop()
	report, err := w.Ask(ctx, node, c)
	if err != nil {
		return err
	}
	return report.Missing(c)
}

// maxAnswer bounds the answer of a node.
const maxAnswer = 1 << 20

// OverHTTP returns a function for Waiting.Ask that asks the Handler of each node. address returns
// its URL, such as "http://192.0.2.1:10256/programmed".
func OverHTTP(client *http.Client, address func(node string) string) func(context.Context, string, ServiceChange) (NodeReport, error) {
	return func(ctx context.Context, node string, c ServiceChange) (r NodeReport, err error) {
		query := url.Values{}
		if c.Service.Name != "" {
			query.Set("service", c.Service.String())
		}
		for _, endpoint := range slices.Concat(c.Left, c.Joined) {
			query.Add("endpoint", formatEndpoint(endpoint))
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, address(node)+"?"+query.Encode(), http.NoBody)
		if err != nil {
			return r, err
		}
		answer, err := client.Do(request)
		if err != nil {
			return r, err
		}
		defer func() { err = errors.Join(err, answer.Body.Close()) }()
		if answer.StatusCode != http.StatusOK {
			return r, fmt.Errorf("%s: status %s", request.URL, answer.Status)
		}
		if err := json.NewDecoder(io.LimitReader(answer.Body, maxAnswer)).Decode(&r); err != nil {
			return r, fmt.Errorf("%s: answer is not a report: %w", request.URL, err)
		}
		return r, nil
	}
}
