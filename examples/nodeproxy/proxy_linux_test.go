package main

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

	"github.com/serviceplane/serviceplane/healthcheck"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// build builds the program as the image has it, once for all tests. TestMain removes it.
var build = sync.OnceValues(func() (string, error) {
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

// proxyProcess is the program as a process of its own, inside a namespace.
type proxyProcess struct {
	t      *testing.T
	ns     *netns.NS
	cmd    *exec.Cmd
	output output
	ended  chan struct{} // closed when the process has ended
	err    error         // of the process, once it has ended
}

// start starts the program. It is killed with the test at the latest. The
// arguments that come first leave the machine's kernel settings alone.
func start(t *testing.T, ns *netns.NS, args ...string) *proxyProcess {
	t.Helper()
	binary, err := build()
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"--hostname-override=node-1", "--conntrack-max-per-core=0", "--healthz-bind-address=127.0.0.1"}, args...)
	p := &proxyProcess{t: t, ns: ns, cmd: exec.Command(binary, args...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	if err := ns.Do(p.cmd.Start); err != nil {
		t.Fatalf("start: %v", err)
	}
	p.attend()
	return p
}

// attend waits for the process, which ends with the test at the latest.
func (p *proxyProcess) attend() {
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

// signal sends a signal and returns how long the process took to end, and with
// which error.
func (p *proxyProcess) signal(s os.Signal) (time.Duration, error) {
	p.t.Helper()
	sent := time.Now()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("send %v: %v", s, err)
	}
	return p.wait().Sub(sent), p.err
}

// wait waits for the process to end by itself, and returns when it did.
func (p *proxyProcess) wait() time.Time {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatalf("the process goes on after %v", patience)
	}
	return time.Now()
}

// kill ends the process without any chance to tidy up, if it still runs.
func (p *proxyProcess) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// stderr is what the process has written so far.
func (p *proxyProcess) stderr() string { return p.output.String() }

// waitHealthy waits until /healthz says that everything is programmed.
func (p *proxyProcess) waitHealthy() {
	p.t.Helper()
	code := 0
	ok := poll.Soon(func() bool {
		code, _ = p.get("127.0.0.1:10256", healthcheck.HealthzPath)
		return code == http.StatusOK
	})
	if !ok {
		p.t.Fatalf("/healthz answers %d, want 200", code)
	}
}

// waitOutput waits until the process has written all of the snippets.
func (p *proxyProcess) waitOutput(snippets ...string) {
	p.t.Helper()
	for _, snippet := range snippets {
		if !poll.Soon(func() bool { return bytes.Contains([]byte(p.stderr()), []byte(snippet)) }) {
			p.t.Errorf("output lacks %q", snippet)
		}
	}
}

// get asks one of the process's servers. The code is 0 if there is no answer.
func (p *proxyProcess) get(address, path string) (code int, body string) {
	p.t.Helper()
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return p.ns.Dial(ctx, network, address)
		},
	}}
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

// health is the report of the health server.
func (p *proxyProcess) health() (report healthcheck.Report) {
	p.t.Helper()
	_, body := p.get("127.0.0.1:10256", healthcheck.HealthzPath)
	if err := json.Unmarshal([]byte(body), &report); err != nil {
		p.t.Errorf("health report %q: %v", body, err)
	}
	return report
}

// output collects what a process writes.
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
