package spctl_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode"

	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

// FuzzAnswers: whatever a proxy answers, a command ends, with a status that the package documents,
// and nothing in its tables can move the terminal's cursor.
func FuzzAnswers(f *testing.F) {
	lines := []string{
		"services", "services -o yaml", "get shop/web", "explain 10.0.0.1 10.96.0.10:80", "status", "syncs", "watch --count 1", "state", "wait shop/web --services 1 --timeout 0s", "verify", "verify -o yaml",
		"rules shop/web", "counts", "trace 10.0.0.1 10.96.0.10:80", "trace 10.0.0.1 10.96.0.10:80 --send --origin pod",
	}
	for i := range lines {
		for _, answer := range []string{
			"", "{}", "null", "[]", `{"services": [{"namespace": "shop", "name": "a\u001b[2J", "servicePorts": [{"port": 80}]}], "total": 99}`,
			`{"families": [{"family": "IPv4", "total": 1, "differences": [{"object": "x"}], "text": "a\n\tb\u0000"}], "agrees": false}`,
			`{"verdict": "dropped", "steps": [{"rule": "drop", "command": "nft\n"}], "explain": {"packet": {}, "endpoints": [{}]}, "reasons": ["x"]}`,
			`{"type": "changed", "servicePort": null, "endpointsAdded": [{"address": "\u009b"}]}` + "\n",
		} {
			f.Add(uint8(i), 200, []byte(answer))
		}
	}
	f.Add(uint8(0), 404, []byte(`{"error": "no such page"}`))
	f.Fuzz(func(t *testing.T, line uint8, status int, answer []byte) {
		status = min(max(status, http.StatusOK), 599) // others are none of an answer's
		client := &http.Client{Transport: answering(func(*http.Request) *http.Response {
			w := httptest.NewRecorder()
			w.WriteHeader(status)
			_, _ = w.Write(answer)
			return w.Result()
		})}
		text := lines[int(line)%len(lines)]
		var out bytes.Buffer
		command := spctl.New(spctl.Options{Address: "http://192.0.2.1", Client: client})
		command.SetArgs(strings.Fields(text))
		command.SetOut(&out)
		command.SetErr(&out)
		err := command.ExecuteContext(t.Context())
		if status != http.StatusOK && err == nil {
			t.Errorf("%s: no error for status %d", text, status)
		}
		tables := !strings.Contains(text, "-o ") && text != "state"
		if i := bytes.IndexFunc(out.Bytes(), func(r rune) bool { return r != '\n' && unicode.IsControl(r) }); tables && i >= 0 {
			t.Errorf("%s prints %q, which has a control character", text, out.String())
		}
	})
}

// answering is a transport without a network.
type answering func(*http.Request) *http.Response

func (a answering) RoundTrip(r *http.Request) (*http.Response, error) { return a(r), nil }

// FuzzArguments: no command line is more than an error, and no argument becomes another request
// than that of its subcommand.
func FuzzArguments(f *testing.F) {
	for _, line := range []string{
		"services a -n b", "get ../../trace", "get a/b?x=1", "explain 1 2 --origin x", "explain --from ::1%eth0 --to [::]:80/tcp", "trace a b --send --timeout -1s --packets -1",
		"counts a/b --limit -1", "rules %2e%2e/x", "diff /dev/null", "diff --with unix:///x", "state x", "watch a --count -1", "status -o yaml", "verify --", "completion bash", "__complete get ",
	} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Fields(line)
		for _, arg := range args {
			if strings.Contains(arg, "diff") || strings.HasPrefix(arg, "--address") || strings.HasPrefix(arg, "--wit") {
				return // they name files and servers
			}
		}
		known := map[string]bool{}
		for _, c := range spctl.New(spctl.Options{}).Commands() {
			known["/"+c.Name()] = true
		}
		known["/service"] = true // of get
		asked := 0
		client := &http.Client{Transport: answering(func(r *http.Request) *http.Response {
			if asked++; !known[r.URL.Path] || r.URL.Host != "192.0.2.1" {
				t.Errorf("%q asks %v", args, r.URL)
			}
			w := httptest.NewRecorder()
			_, _ = w.WriteString(`{"type": "watching"}`)
			return w.Result()
		})}
		command := spctl.New(spctl.Options{Address: "http://192.0.2.1", Client: client})
		command.SetArgs(args)
		command.SetOut(&bytes.Buffer{})
		command.SetErr(&bytes.Buffer{})
		if status := spctl.ExitStatus(command.ExecuteContext(t.Context())); status < 0 || status > spctl.StatusFailed {
			t.Errorf("%q: exit status %d", args, status)
		}
	})
}
