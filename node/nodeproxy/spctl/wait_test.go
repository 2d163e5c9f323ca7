package spctl_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// hasHeard tells a proxy up to which versions it has heard everything, and programs that.
func hasHeard(t *testing.T, p *proxier.Proxier, version string) {
	t.Helper()
	p.OnVersion(changetracker.InputServices, version)
	p.OnVersion(changetracker.InputEndpointSlices, version)
	if err := proxiertest.Sync(t.Context(), p); err != nil {
		t.Error(err)
	}
}

// Command wait ends when the last node has the change, and names the nodes behind when the time ends.
func TestWait(t *testing.T) {
	t.Parallel()
	fast, slow := newProxy(t), newProxy(t)
	hasHeard(t, fast, "20")
	hasHeard(t, slow, "9")
	asked := make(chan struct{})
	first, handler := sync.OnceFunc(func() { close(asked) }), debughttp.Handler(slow)
	late := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r)
		first()
	}))
	nodes := []spctl.NodeProxy{{Name: "node-1", Address: serve(t, debughttp.Handler(fast))}, {Name: "node-2", Address: late}}
	options := spctl.Options{
		Nodes: func(context.Context) ([]spctl.NodeProxy, error) { return nodes, nil },
		Versions: func(_ context.Context, namespace, name string) (services, endpointSlices string, err error) {
			if namespace+"/"+name != "shop/web" {
				return "", "", errors.New("no such Service")
			}
			return "10", "20", nil
		},
	}
	var changes sync.WaitGroup
	changes.Go(func() {
		<-asked
		hasHeard(t, slow, "20")
	})
	out, err := runWith(t, options, "wait", "shop/web", "--timeout", "1m")
	changes.Wait()
	if err != nil || strings.Count(out, "yes") != 2 {
		t.Errorf("wait prints\n%s%v, want yes for both nodes", out, err)
	}
	for _, c := range []struct {
		line   string
		status int
		want   string
	}{
		{"wait shop/web --timeout 0s", 0, "node-2 yes"},
		{"wait shop/none --timeout 0s", spctl.StatusFailed, ""},
		{"wait shop/web --services 21 --timeout 0s", spctl.StatusDifferent, "node-1 no IPv4: Services are those of version 20, want 21; IPv6: Services are those of version 20, want 21"},
		{"wait shop/web --endpointslices 100 --node node-2 --timeout 300ms", spctl.StatusDifferent, "node-2 no IPv4: EndpointSlices are those of version 20, want 100"},
		{"wait shop/web --services 21 --timeout 0s -o json", spctl.StatusDifferent, `"programmed": false`},
		{"wait shop/web --left 10.9.9.9 --timeout 0s", 0, "node-2 yes"},
		{"wait shop/web --left 10.244.1.5,10.9.9.9 --timeout 0s", spctl.StatusDifferent, "node-1 no IPv4: it still sends to 10.244.1.5:8080: port"},
		{"wait shop/web --left x --timeout 0s", spctl.StatusFailed, "want ADDRESS or ADDRESS:PORT"},
		{"wait shop/web --services x --timeout 0s", spctl.StatusFailed, "cannot be compared"},
	} {
		out, err := runWith(t, options, strings.Fields(c.line)...)
		if text := gaps.ReplaceAllString(out, " "); spctl.ExitStatus(err) != c.status || !strings.Contains(text, c.want) {
			t.Errorf("%s: exit status %d, %v, and prints\n%swant %d and %q", c.line, spctl.ExitStatus(err), err, out, c.status, c.want)
		}
	}
	nodes[0].Err = errors.New("the pod is Pending")
	out, err = runWith(t, options, "wait", "shop/web", "--timeout", "0s")
	if spctl.ExitStatus(err) != spctl.StatusFailed || !strings.Contains(out, "the pod is Pending") {
		t.Errorf("with a node that does not answer: %v, and prints\n%swant the reason", err, out)
	}
	if _, err := run(t, nodes[1].Address, "wait", "shop/web"); err == nil || !strings.Contains(err.Error(), "--endpointslices") {
		t.Errorf("without versions: %v, want what to do", err)
	}
}

// TestWaitCountsNodesWithoutAProxy: a node between two pods of the proxy still has its rules. It is
// waited for, and asked when it has a pod again; nodes that do not count are not.
func TestWaitCountsNodesWithoutAProxy(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	hasHeard(t, p, "20")
	address := serve(t, debughttp.Handler(p))
	var mu sync.Mutex
	nodes := []spctl.NodeProxy{{Name: "node-1", Address: address}, {Name: "gone", Err: errors.New("the pod is Failed")}}
	options := spctl.Options{
		Nodes:   func(context.Context) ([]spctl.NodeProxy, error) { mu.Lock(); defer mu.Unlock(); return nodes, nil },
		Awaited: func(context.Context) ([]string, error) { return []string{"node-1", "node-2"}, nil },
	}
	const line = "wait shop/web --endpointslices 20 --timeout "
	out, err := runWith(t, options, strings.Fields(line+"0s")...)
	if text := gaps.ReplaceAllString(out, " "); spctl.ExitStatus(err) != spctl.StatusFailed || !strings.Contains(text, "node-1 yes") ||
		!strings.Contains(text, "node-2 ask node-2: no proxy runs there now") || strings.Contains(text, "gone") {
		t.Errorf("with a node without a proxy: %v, and prints\n%swant node-2 and why, and nothing of gone", err, out)
	}
	out, err = runWith(t, options, strings.Fields(line+"0s --node node-1")...)
	if err != nil || strings.Contains(out, "node-2") {
		t.Errorf("with --node: %v, and prints\n%swant node-1 only", err, out)
	}
	mu.Lock() // the new pod, beside the old one
	nodes = append(nodes, spctl.NodeProxy{Name: "node-2", Err: errors.New("the pod is Failed")}, spctl.NodeProxy{Name: "node-2", Address: address})
	mu.Unlock()
	out, err = runWith(t, options, strings.Fields(line+"1m")...)
	if err != nil || strings.Count(out, "yes") != 2 {
		t.Errorf("with a new pod: %v, and prints\n%swant yes for both nodes", err, out)
	}
	options.Awaited = func(context.Context) ([]string, error) { return nil, errors.New("forbidden") }
	if _, err := runWith(t, options, strings.Fields(line+"0s")...); err == nil || !strings.Contains(err.Error(), "list nodes that count: forbidden") {
		t.Errorf("without the right to list Nodes: %v, want the reason", err)
	}
	for want, options := range map[string]spctl.Options{"asks one proxy": {}, "counts only nodes that have a proxy": {Nodes: options.Nodes}, "All nodes that count": options} {
		if out, err := runWith(t, options, "wait", "--help"); err != nil || !strings.Contains(out, want) {
			t.Errorf("help: %v\n%swant %q", err, out, want)
		}
	}
}

// TestWaitEndsBesideAProxyThatHangs: the limit of the wait ends a request too, and the others' answers stay.
func TestWaitEndsBesideAProxyThatHangs(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	hasHeard(t, p, "20")
	hangs := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	nodes := []spctl.NodeProxy{{Name: "node-1", Address: serve(t, debughttp.Handler(p))}, {Name: "node-2", Address: hangs}}
	options := spctl.Options{Nodes: func(context.Context) ([]spctl.NodeProxy, error) { return nodes, nil }}
	out, err := runWith(t, options, "wait", "shop/web", "--endpointslices", "20", "--timeout", "3s", "--request-timeout", "0")
	if text := gaps.ReplaceAllString(out, " "); spctl.ExitStatus(err) != spctl.StatusFailed || !strings.Contains(text, "node-1 yes") || !strings.Contains(text, "node-2 ask") {
		t.Errorf("%v, and prints\n%swant yes for node-1 and why node-2 is not known", err, out)
	}
}

// TestWaitListsAgain: a pod of the proxy that comes during the wait is asked.
func TestWaitListsAgain(t *testing.T) {
	t.Parallel()
	p := newProxy(t)
	hasHeard(t, p, "20")
	address := serve(t, debughttp.Handler(p))
	var mu sync.Mutex
	lists := 0
	options := spctl.Options{Nodes: func(context.Context) ([]spctl.NodeProxy, error) {
		mu.Lock()
		defer mu.Unlock()
		if lists++; lists == 1 {
			return []spctl.NodeProxy{{Name: "node-1", Err: errors.New("the pod is Pending")}}, nil
		}
		return []spctl.NodeProxy{{Name: "node-1", Address: address}}, nil
	}}
	out, err := runWith(t, options, "wait", "shop/web", "--endpointslices", "20", "--timeout", "5m")
	if err != nil || !strings.Contains(out, "yes") {
		t.Errorf("wait: %v, and prints\n%swant yes", err, out)
	}
}
