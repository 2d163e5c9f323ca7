package nodeproxy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/node/programmed"
)

// build builds the program as the image has it, once for all tests. TestMain removes it.
var build = sync.OnceValues(func() (string, error) {
	if inVM() {
		return os.Executable() // the machine has no Go
	}
	dir, err := os.MkdirTemp("", "nodeproxy")
	if err != nil {
		return "", err
	}
	built = dir
	binary := filepath.Join(dir, "nodeproxy")
	if out, err := exec.Command("deploy/build.sh", binary).CombinedOutput(); err != nil {
		return "", fmt.Errorf("deploy/build.sh: %w\n%s", err, out)
	}
	return binary, nil
})

// proxyProcess is a process of the program in a network namespace.
type proxyProcess struct {
	t      testing.TB
	ns     *netns.NS
	cmd    *exec.Cmd
	output output
	log    string        // file of the output instead; "" for none
	ended  chan struct{} // closed when the process has ended
	err    error         // of the process, once it has ended
}

// start starts the program, and kills it at the end of the test. The first arguments keep
// the machine's kernel settings.
func start(tb testing.TB, ns *netns.NS, args ...string) *proxyProcess {
	tb.Helper()
	p := prepare(tb, ns, args...)
	p.run()
	return p
}

// prepare prepares what start runs.
func prepare(tb testing.TB, ns *netns.NS, args ...string) *proxyProcess {
	tb.Helper()
	binary, err := build()
	if err != nil {
		tb.Fatal(err)
	}
	args = append([]string{"--hostname-override=node-1", "--conntrack-max-per-core=0", "--healthz-bind-address=127.0.0.1"}, args...)
	p := &proxyProcess{t: tb, ns: ns, cmd: exec.Command(binary, args...), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), asProgram+"=yes")
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	return p
}

// run starts the process, and kills it at the end of the test.
func (p *proxyProcess) run() {
	p.t.Helper()
	if err := p.ns.Do(p.cmd.Start); err != nil {
		p.t.Fatalf("start: %v", err)
	}
	p.watch()
}

// watch waits for the process, and kills it at the end of the test.
func (p *proxyProcess) watch() {
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	p.t.Cleanup(func() {
		p.kill()
		if p.t.Failed() {
			p.t.Logf("output of nodeproxy:\n%s", p.stderr())
		}
	})
}

// signal sends a signal, waits for the process to end, and returns its error.
func (p *proxyProcess) signal(s os.Signal) error {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("send %v: %v", s, err)
	}
	p.wait()
	return p.err
}

// wait waits for the process to end.
func (p *proxyProcess) wait() {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(poll.Timeout):
		p.t.Fatalf("the process still runs after %v", poll.Timeout)
	}
}

// kill kills the process if it still runs.
func (p *proxyProcess) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// stderr returns the output so far.
func (p *proxyProcess) stderr() string {
	text := p.output.String()
	if p.log != "" {
		file, _ := os.ReadFile(p.log) // there is none before the program starts
		text += string(file)
	}
	return text
}

// waitHealthy waits until /healthz reports that everything is programmed.
func (p *proxyProcess) waitHealthy() {
	p.t.Helper()
	p.waitCode("127.0.0.1:10256", healthcheck.HealthzPath, http.StatusOK)
}

// waitCode waits until a server responds with a code; 0 is no response.
func (p *proxyProcess) waitCode(address, path string, want int) {
	p.t.Helper()
	poll.Nil(p.t, fmt.Sprintf("code %d from %s%s", want, address, path), func() error {
		if code, _ := p.get(address, path); code != want {
			return fmt.Errorf("code %d", code)
		}
		return nil
	})
}

// cleanUp runs the program with --cleanup, and wants exit code 0.
func cleanUp(t *testing.T, ns *netns.NS, args ...string) {
	t.Helper()
	p := start(t, ns, append(args, "--cleanup")...)
	if p.wait(); p.err != nil {
		t.Errorf("--cleanup: %v, want exit code 0", p.err)
	}
}

// waitOutput waits until the output contains all snippets.
func (p *proxyProcess) waitOutput(snippets ...string) {
	p.t.Helper()
	for _, snippet := range snippets {
		if !poll.Soon(func() bool { return bytes.Contains([]byte(p.stderr()), []byte(snippet)) }) {
			p.t.Errorf("output lacks %q", snippet)
		}
	}
}

// client returns a client in the node's network namespace.
func (p *proxyProcess) client() *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return p.ns.Dial(ctx, network, address)
		},
	}}
}

// waitProgrammed waits until the proxy says that it has programmed some versions.
func (p *proxyProcess) waitProgrammed(versions changetracker.Versions) {
	p.t.Helper()
	ctx, stop := context.WithTimeout(p.t.Context(), time.Minute)
	defer stop()
	err := programmed.Wait(ctx, programmed.Waiting{
		Nodes: func(context.Context) ([]string, error) { return []string{"node-1"}, nil },
		Ask:   programmed.OverHTTP(p.client(), func(string) string { return "http://127.0.0.1:10256/programmed" }),
	}, programmed.ServiceChange{Service: types.NamespacedName{Namespace: "default", Name: "web"}, Versions: versions})
	if err != nil {
		p.t.Error(err)
	}
}

// waitNothingPending waits until everything that the trackers have heard is programmed. Decisions
// of checks are pending before their metrics show them.
func (p *proxyProcess) waitNothingPending() {
	p.t.Helper()
	p.expectMetrics(`serviceplane_pending_seconds{ip_family="IPv4"} 0`, `serviceplane_pending_seconds{ip_family="IPv6"} 0`)
}

// get sends a request to a server of the process. The code is 0 without a response.
func (p *proxyProcess) get(address, path string) (code int, body string) {
	p.t.Helper()
	client := p.client()
	request, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "http://"+address+path, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	answer, err := client.Do(request)
	if err != nil {
		return 0, ""
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text)
}

// health returns the report of the health server.
func (p *proxyProcess) health() (report healthcheck.Healthz) {
	p.t.Helper()
	_, body := p.get("127.0.0.1:10256", healthcheck.HealthzPath)
	if err := json.Unmarshal([]byte(body), &report); err != nil {
		p.t.Errorf("health report %q: %v", body, err)
	}
	return report
}

// output collects the output of a process.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer // guarded by mu
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}
