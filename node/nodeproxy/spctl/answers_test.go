package spctl_test

import (
	"bytes"
	"net/http"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

// TestAnswers compares the tables of answers that need an engine in the kernel with
// testdata/answers.txt, and the exit statuses. The answers are those that package debughttp
// documents.
func TestAnswers(t *testing.T) {
	t.Parallel()
	answers := map[string]string{
		"GET /agrees/verify":   `{"agrees": true, "families": [{"family": "IPv4", "checked": 12, "total": 0, "differences": []}]}`,
		"GET /differs/verify":  `{"agrees": false, "families": [{"family": "IPv4", "checked": 12, "total": 1, "differences": [{"object": "element 10.96.0.10 . tcp . 80 of map services", "problem": "missing", "want": "goto c1", "service": "shop/web:http/TCP"}]}]}`,
		"GET /fails/verify":    `{"agrees": false, "families": [{"family": "IPv4", "checked": 0, "total": 0, "differences": [], "error": "list table: no permission"}]}`,
		"GET /rules":           `{"namespace": "shop", "name": "web", "families": [{"family": "IPv4", "text": "table ip kube-proxy {\n\tmap services {\n\t}\n}\n"}]}`,
		"GET /counts":          `{"since": "2026-01-02T03:04:05Z", "total": 7, "servicePorts": [{"namespace": "shop", "name": "web", "portName": "http", "protocol": "TCP", "family": "IPv4", "connections": 3, "packetsIn": 20, "packetsOut": 10, "bytesIn": 1000, "bytesOut": 2000, "endpoints": [{"address": "10.244.1.5:8080", "connections": 3}]}]}`,
		"GET /none/counts":     `{"since": "2026-01-02T03:04:05Z", "trafficProblem": "net.netfilter.nf_conntrack_acct is 0", "trafficLosses": 2, "servicePorts": []}`,
		"GET /status":          `{"node": {"addresses": ["192.0.2.10"], "podCIDRs": ["10.244.1.0/24"]}, "families": []}`,
		"POST /trace":          `{"steps": [{"table": "kube-proxy", "family": "ip", "chain": "nat-prerouting", "hook": "prerouting", "rule": "ip daddr 10.96.0.10 goto c1", "verdict": "continue", "ours": true}, {"table": "firewall", "family": "inet", "chain": "forward", "hook": "forward", "rule": "xt match owner drop", "comment": "no TCP here", "handle": 7, "command": "nft -a list chain inet firewall forward", "verdict": "drop", "ours": false}], "sent": "no answer", "verdict": "drop", "by": "a rule of chain forward in table inet firewall, which is not ours", "reasons": ["it never reached 10.244.1.5:8080"], "explain": {"packet": {"protocol": "TCP", "source": "10.244.1.5", "destination": "10.96.0.10:80", "origin": "pod"}, "verdict": "forward"}, "agrees": false}`,
		"GET /explain":         `{"packet": {"protocol": "TCP", "source": "10.244.1.5", "destination": "10.96.0.10:80", "origin": "pod"}, "verdict": "forward", "bySocket": true, "reasons": ["by a socket: the client's connect(2) goes to an endpoint"], "endpoints": [{"address": "10.244.1.6:8080", "state": "ready"}]}`,
		"GET /rules/explain":   `{"packet": {"protocol": "UDP", "source": "10.244.1.5", "destination": "10.96.0.10:53", "origin": "pod"}, "verdict": "forward", "reasons": ["by rules, because the protocol is not TCP"], "endpoints": []}`,
		"GET /none/status":     `{"node": {}, "families": []}`,
		"POST /none/trace":     "",
		"GET /none/rules":      "",
		"GET /agrees/services": `{"total": 0, "services": []}`,
	}
	address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if text := answers[r.Method+" "+r.URL.Path]; text != "" {
			_, _ = w.Write([]byte(text))
			return
		}
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte(`{"error": "no such page"}`))
	}))
	var all strings.Builder
	for _, step := range []struct{ path, line string }{
		{"/agrees", "verify"},
		{"/differs", "verify"},
		{"/fails", "verify"},
		{"", "rules shop/web"},
		{"/none", "rules shop/web"},
		{"", "counts"},
		{"/none", "counts shop/web --limit 5"},
		{"", "trace 10.244.1.5 10.96.0.10:80 --send --netns pod-1 --timeout 5s --packets 2"},
		{"/none", "trace 10.244.1.5 10.96.0.10:80"},
		{"", "explain 10.244.1.5 10.96.0.10:80 --origin pod"},
		{"/rules", "explain 10.244.1.5 10.96.0.10:53/udp --origin pod"},
	} {
		all.WriteString(transcript(t, spctl.Options{Address: address + step.path}, step.line))
	}
	golden(t, "answers.txt", all.String())
}

// Examples begin with the command, also if another program mounts it, and each time.
func TestExamplesBeginWithTheCommand(t *testing.T) {
	t.Parallel()
	agent := &cobra.Command{Use: "agent"}
	agent.AddCommand(spctl.New(spctl.Options{Use: "proxy"}))
	for name, root := range map[string]*cobra.Command{"spctl": spctl.New(spctl.Options{}), "agent proxy": agent} {
		for range 2 {
			var out bytes.Buffer
			root.SetOut(&out)
			root.SetArgs(append(strings.Fields(name)[1:], "trace", "--help"))
			if err := root.Execute(); err != nil {
				t.Error(err)
			}
			want := "Examples:\n" + name + " trace 10.244.0.1 10.96.0.10:80 --send\n" + name + " trace 10.244.0.1 10.96.0.10:80/UDP"
			if !strings.Contains(out.String(), want) {
				t.Errorf("the help is\n%swant\n%s", &out, want)
			}
		}
	}
}

// The flags of trace become parameters.
func TestParameters(t *testing.T) {
	t.Parallel()
	asked := ""
	address := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.Method + " " + r.URL.String()
		_, _ = w.Write([]byte(`{"agrees": true}`))
	}))
	for line, want := range map[string]string{
		"trace 10.0.0.1 [::1]:53/udp --origin outside --interface eth0 --timeout 90s --packets 3 --send --netns pod": "POST /trace?destination=%5B%3A%3A1%5D%3A53&interface=eth0&netns=pod&origin=outside&packets=3&protocol=UDP&send=true&source=10.0.0.1&timeout=1m30s",
		"counts a/b --limit 7": "GET /counts?limit=7&name=b&namespace=a",
		"rules b":              "GET /rules?name=b&namespace=default",
	} {
		if _, err := run(t, address, strings.Fields(line)...); err != nil || asked != want {
			t.Errorf("%s asks\n%s, %v, want\n%s", line, asked, err, want)
		}
	}
}
