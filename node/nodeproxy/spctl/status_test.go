package spctl_test

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

// statuses are command lines of each subcommand, with the exit status against a proxy that
// works and has Service shop/web. A line that is wrong before anything is asked has no proxy.
var statuses = map[string]struct {
	works map[string]int
	usage []string
}{
	"services": {map[string]int{"": 0, "web": 0, "nothing": 0, "--filter fast": 2}, []string{"a b", "--limit x", "--none"}},
	"get":      {map[string]int{"shop/web": 0, "shop/none": 2, "web": 2}, []string{"", "a/b/c", "a b"}},
	"explain":  {map[string]int{"10.244.1.5 10.96.0.10:80": 0, "10.244.1.5 10.96.0.99:80": 0, "x 10.96.0.10:80": 2, "10.0.0.1 10.96.0.10": 2}, []string{"", "10.0.0.1", "a b c"}},
	"status":   {map[string]int{"": 0}, []string{"x", "-o xml"}},
	"syncs":    {map[string]int{"": 0}, []string{"x"}},
	"watch":    {nil, []string{"a b", "a/b/c", "--count x"}},
	"state":    {map[string]int{"": 0}, []string{"x"}},
	"diff":     {map[string]int{"--with ADDRESS": 0, "--with OTHER": 1, "--with NOBODY": 2, "/no/such/file": 2, "": 2}, nil},
	"verify":   {map[string]int{"": 2}, []string{"x"}}, // the engine cannot
	"rules":    {map[string]int{"shop/none": 2, "shop/web": 2}, []string{"", "a/b/c"}},
	"counts":   {map[string]int{"--limit -1": 2}, []string{"a b", "a/b/c", "--limit x"}},
	"wait":     {map[string]int{"shop/web --services 1 --timeout 0s": 1, "shop/web": 2}, []string{"", "a/b/c", "a b", "a --timeout x"}},
	"trace":    {map[string]int{"10.244.1.5 10.96.0.10:80": 2}, []string{"", "10.0.0.1", "--timeout x a b", "--packets x a b"}},
}

// Every subcommand has the exit status that the package documents, for a proxy that works, for one that does not
// run, for another program, and for wrong arguments.
func TestExitStatusOfEverySubcommand(t *testing.T) {
	t.Parallel()
	const nobody = "http://127.0.0.1:1"
	working, other := serve(t, debughttp.Handler(newProxy(t))), serve(t, debughttp.Handler(newProxy(t, otherProxy)))
	stranger := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("hello")) }))
	check := func(address, line string, want int) {
		line = strings.NewReplacer("ADDRESS", working, "OTHER", other, "NOBODY", nobody).Replace(line)
		out, err := run(t, address, strings.Fields(line)...)
		if got := spctl.ExitStatus(err); got != want {
			t.Errorf("spctl --address=%s %s: exit status %d, %v, want %d; it prints\n%s", address, line, got, err, want, out)
		}
	}
	valid := map[string]string{"get": "shop/web", "rules": "shop/web", "explain": "10.0.0.1 10.96.0.10:80", "trace": "10.0.0.1 10.96.0.10:80", "diff": "--with ADDRESS", "wait": "shop/web --services 1 --timeout 0s"}
	for _, c := range spctl.New(spctl.Options{}).Commands() {
		lines, ok := statuses[c.Name()]
		if !ok {
			t.Errorf("subcommand %s: no line in the table", c.Name())
		}
		for args, status := range lines.works {
			check(working, c.Name()+" "+args, status)
		}
		for _, args := range lines.usage {
			check(nobody, c.Name()+" "+args, spctl.StatusFailed)
		}
		check(nobody, c.Name()+" "+valid[c.Name()], spctl.StatusFailed)
		check(stranger, c.Name()+" "+valid[c.Name()], spctl.StatusFailed)
	}
	check(working, "unknown", spctl.StatusFailed)
	check("ftp://x", "status", spctl.StatusFailed)
}

// The exit status says what verify and trace found. An error of a proxy that has another cause is no difference.
func TestExitStatusOfAnswers(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]int{
		`{"agrees": true, "families": [{"family": "IPv4"}], "verdict": "translated"}`:                 0,
		`{"agrees": false, "families": [{"family": "IPv4", "total": 1}], "verdict": "dropped"}`:       spctl.StatusDifferent,
		`{"agrees": false, "families": [{"family": "IPv4", "error": "no"}], "verdict": "unseen"}`:     spctl.StatusFailed,
		`{"agrees": false, "families": [{"error": "no"}], "verdict": "unseen", "sent": "no answer"}`:  spctl.StatusFailed,
		`{"agrees": false, "families": [{"error": "no"}], "verdict": "unseen", "sent": "no route"}`:   spctl.StatusFailed,
		`{"agrees": false, "families": [{"total": 1}], "verdict": "rejected", "sent": "no route"}`:    spctl.StatusDifferent,
		`{"agrees": false, "families": [{"total": 1}, {"error": "no"}], "verdict": "unseen"}`:         spctl.StatusFailed,
		`{"agrees": false, "families": 7, "steps": 7}`:                                                spctl.StatusFailed,
		`{"agrees": false, "families": [{"total": 1}], "verdict": "lost", "explain": {"packet": {}}}`: spctl.StatusDifferent,
	} {
		address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(answer)) }))
		for _, line := range []string{"verify", "trace --origin pod 10.0.0.1 10.96.0.10:80", "trace --origin pod 10.0.0.1 10.96.0.10:80 --send"} {
			if _, err := run(t, address, strings.Fields(line)...); spctl.ExitStatus(err) != want {
				t.Errorf("%s of %s: exit status %d, %v, want %d", line, answer, spctl.ExitStatus(err), err, want)
			}
		}
	}
}

// TestStatusOfNodes: rows are in the order of names, and each condition is in one row.
func TestStatusOfNodes(t *testing.T) {
	t.Parallel()
	address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"node": {}, "families": [{"family": "IPv4"}, {"family": "IPv6"}], "conditions": [{"type": "Node"}, {"type": "Contested", "family": "IPv6"}]}`))
	}))
	options := spctl.Options{Nodes: func(context.Context) ([]spctl.NodeProxy, error) {
		return []spctl.NodeProxy{{Name: "node-2", Address: address}, {Name: "node-1", Address: address}}, nil
	}}
	out, err := runWith(t, options, "status")
	var got []string
	for line := range strings.Lines(out) {
		if cells := strings.Fields(line); strings.HasPrefix(line, "node-") {
			got = append(got, strings.Join([]string{cells[0], cells[len(cells)-1]}, " "))
		}
	}
	if want := []string{"node-1 Node", "node-1 Contested", "node-2 Node", "node-2 Contested"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, and prints\n%swant %q", err, out, want)
	}
}
