package programmed_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/programmed"
)

// nodes is a cluster on a fake clock: each node has version 20 after a while.
type nodes struct {
	start time.Time
	after map[string]time.Duration // a negative one: never, the node does not answer
	gone  map[string]time.Duration // when the node leaves

	mu    sync.Mutex
	asked map[string]int
}

func (n *nodes) list(context.Context) (names []string, err error) {
	for name := range n.after {
		if at, leaves := n.gone[name]; !leaves || time.Since(n.start) < at {
			names = append(names, name)
		}
	}
	return names, nil
}

func (n *nodes) ask(ctx context.Context, node string, _ programmed.ServiceChange) (programmed.NodeReport, error) {
	n.mu.Lock()
	n.asked[node]++
	n.mu.Unlock()
	version := "19"
	switch after := n.after[node]; {
	case after < 0:
		<-ctx.Done()
		return programmed.NodeReport{}, ctx.Err()
	case time.Since(n.start) >= after:
		version = "20"
	}
	return programmed.NodeReport{Node: node, Families: map[v1.IPFamily]programmed.Family{v1.IPv4Protocol: {EndpointSlices: version}}}, nil
}

var change = programmed.ServiceChange{Service: web, Versions: changetracker.Versions{EndpointSlices: "20"}}

// Wait ends with the last node. It names the nodes that are behind at the deadline, asks no node
// again that has the change, and does not wait for nodes that are gone.
func TestWait(t *testing.T) {
	const deadline = time.Minute
	for name, test := range map[string]struct {
		after, gone map[string]time.Duration
		mayBeNone   bool
		took        time.Duration
		behind      string
	}{
		"no nodes":           {took: deadline, behind: "no node counts"},
		"none is needed":     {mayBeNone: true},
		"all have it":        {after: map[string]time.Duration{"a": 0, "b": 0}},
		"one is slow":        {after: map[string]time.Duration{"a": 0, "b": 2 * time.Second}, took: 2 * time.Second},
		"one is cut off":     {after: map[string]time.Duration{"a": 0, "b": -1}, took: deadline, behind: "1 nodes have not programmed the change (context deadline exceeded): node b: context deadline exceeded"},
		"one is behind":      {after: map[string]time.Duration{"a": 0, "b": time.Hour}, took: deadline, behind: "node b: IPv4: EndpointSlices are those of version 19, want 20"},
		"one that lags goes": {after: map[string]time.Duration{"a": 0, "b": time.Hour}, gone: map[string]time.Duration{"b": 3 * time.Second}, took: 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &nodes{start: time.Now(), after: test.after, gone: test.gone, asked: map[string]int{}}
				ctx, stop := context.WithTimeout(t.Context(), deadline)
				defer stop()
				err := programmed.Wait(ctx, programmed.Waiting{Nodes: n.list, Ask: n.ask, MayBeNone: test.mayBeNone}, change)
				if took := time.Since(n.start); took < test.took || took > test.took+time.Second {
					t.Errorf("Wait took %v, want %v", took, test.took)
				}
				if n.asked["a"] > 1 {
					t.Errorf("node a has the change and was asked %d times", n.asked["a"])
				}
				if test.behind == "" && err != nil || test.behind != "" && (err == nil || !strings.Contains(err.Error(), test.behind)) {
					t.Errorf("Wait = %v, want %q", err, test.behind)
				}
				if e, ok := errors.AsType[*programmed.BehindError](err); test.behind != "" && (!ok || len(e.Nodes) != 1 || e.Nodes["b"] == nil && e.Nodes["?"] == nil || !errors.Is(err, context.DeadlineExceeded)) {
					t.Errorf("Wait = %#v, want a BehindError of node b, or of none", err)
				}
			})
		})
	}
}

// 5,000 nodes are asked, but never more than AtOnce at a time.
func TestWaitAsksFewAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		running, most := 0, 0
		count := func(d int) {
			mu.Lock()
			defer mu.Unlock()
			running += d
			most = max(most, running)
		}
		n := &nodes{start: time.Now(), after: map[string]time.Duration{}, asked: map[string]int{}}
		for i := range 5000 {
			n.after["n"+strconv.Itoa(i)] = 0
		}
		ask := func(ctx context.Context, node string, c programmed.ServiceChange) (programmed.NodeReport, error) {
			count(1)
			defer count(-1)
			time.Sleep(10 * time.Millisecond)
			return n.ask(ctx, node, c)
		}
		if err := programmed.Wait(t.Context(), programmed.Waiting{Nodes: n.list, Ask: ask, AtOnce: 20}, change); err != nil {
			t.Error(err)
		}
		if most != 20 || len(n.asked) != 5000 {
			t.Errorf("%d nodes were asked, %d at once, want 5000 and 20", len(n.asked), most)
		}
	})
}

// The nodes cannot be listed: the error says so.
func TestWaitWithoutNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		err := programmed.Wait(ctx, programmed.Waiting{Nodes: func(context.Context) ([]string, error) { return nil, errors.New("forbidden") }}, change)
		if err == nil || !strings.Contains(err.Error(), "list nodes: forbidden") {
			t.Errorf("Wait = %v, want an error about the list of nodes", err)
		}
	})
}

// A change without a version, or with one that has no order, is an error at once.
func TestVersionsWithoutOrder(t *testing.T) {
	for version, want := range map[string]string{"": "nothing to wait for", "abc": "cannot be compared", "0": "cannot be compared"} {
		err := programmed.Wait(t.Context(), programmed.Waiting{}, programmed.ServiceChange{Service: web, Versions: changetracker.Versions{EndpointSlices: version}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Wait for version %q = %v, want an error with %q", version, err, want)
		}
	}
}

// Answers that are no reports are errors that name the URL.
func TestBadAnswers(t *testing.T) {
	for name, test := range map[string]struct {
		code int
		body string
		want string
	}{
		"no such page": {http.StatusNotFound, "", "status 404"},
		"not JSON":     {http.StatusOK, "<html>", "answer is not a report"},
		"endless":      {http.StatusOK, `{"node":"` + strings.Repeat("x", 2<<20), "answer is not a report"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(test.code)
				_, _ = w.Write([]byte(test.body))
			}))
			defer server.Close()
			_, err := programmed.OverHTTP(server.Client(), func(string) string { return server.URL })(t.Context(), "n", change)
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), server.URL) {
				t.Errorf("Client = %v, want an error with %q and the URL", err, test.want)
			}
		})
	}
}
