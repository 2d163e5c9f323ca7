package docs

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is for compiling, too.
const patience = 5 * time.Minute

// endless are the programs that run until somebody ends them, with what they write
// when they have begun.
func endless() map[string]*regexp.Regexp {
	return map[string]*regexp.Regexp{
		"./examples/nodeproxy":         regexp.MustCompile(`\bstarting\b`),
		"./examples/hybrid":            regexp.MustCompile(`\bsynced\b`),
		"./examples/custom-controller": regexp.MustCompile(`"synced"`),
	}
}

// beginning is what a command writes when it has begun, or nil if it ends by itself.
func beginning(command string) *regexp.Regexp {
	words := strings.Fields(command)
	if len(words) < 3 || words[0] != "go" || words[1] != "run" {
		return nil
	}
	for _, word := range words {
		if word == "--cleanup" || word == "--help" || word == "-h" {
			return nil
		}
	}
	return endless()[words[2]]
}

// TestCommandsRun runs every block of sh in a shell, from the root of the repository
// and in a network namespace of its own, and wants success. What does not end by
// itself is interrupted once it has begun. The environment has a folder for temporary
// files, and KUBECONFIG for an API server that knows this node. The repository cannot
// be written to.
func TestCommandsRun(t *testing.T) {
	for _, s := range scripts(t) {
		var run []string
		for _, command := range s.commands {
			if findElsewhere(command) == nil {
				run = append(run, command)
			}
		}
		if len(run) > 0 {
			t.Run(fmt.Sprintf("%s:%d", s.path, s.line), func(t *testing.T) { runCommands(t, run) })
		}
	}
}

func runCommands(t *testing.T, commands []string) {
	node := netnstest.New(t)
	listener, err := node.Listen(t.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(t, err)
	api := apitest.New(t, apitest.Options{WatchList: true, Listener: listener, Listen: func() (net.Listener, error) {
		return node.Listen(context.Background(), "tcp", "127.0.0.1:6443")
	}})
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	api.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: host}})
	last := len(commands) - 1
	for _, command := range commands[:last] {
		if beginning(command) != nil {
			t.Errorf("%q never ends, so nothing can come after it", command)
			return
		}
	}
	folder := t.TempDir()
	s := start(t, node, strings.Join(commands, "\n"), "KUBECONFIG="+api.Kubeconfig(t), "TMPDIR="+folder)
	if begun := beginning(commands[last]); begun != nil && s.waitFor(begun) {
		interrupt(t, filepath.Join(folder, "program"))
	}
	if err := s.wait(); err != nil {
		t.Errorf("%s\n%v, want success; it wrote\n%s", strings.Join(commands, "\n"), err, s.output.String())
	}
}

// running is a shell at work.
type running struct {
	t       *testing.T
	command *exec.Cmd
	output  output
	ended   chan struct{} // closed when it has ended
	err     error         // of the shell, once it has ended
}

// surroundings make the shell a guest: it cannot write to the repository, what
// programs remember in /run is gone with it, and the kernel's settings that all
// network namespaces share are files.
const surroundings = `set -eu
mount --bind . .
cd "$PWD"
mount -o remount,bind,ro .
mount -t tmpfs tmpfs /run
for shared in /proc/sys/net/netfilter/nf_conntrack_max /sys/module/nf_conntrack/parameters/hashsize; do
  if [ -e "$shared" ]; then
    cat "$shared" >"$TMPDIR/shared"
    cp "$TMPDIR/shared" "/run/$(basename "$shared")"
    mount --bind "/run/$(basename "$shared")" "$shared"
  fi
done
rm -f "$TMPDIR/shared"
printf '#!/bin/sh\necho $$ >"$TMPDIR/program"\nexec "$@"\n' >/run/remember
chmod +x /run/remember
export GOFLAGS="${GOFLAGS:-} -exec=/run/remember -buildvcs=false" GOBIN="$TMPDIR/bin"
`

// start starts a shell, with a namespace of its own for mounts too. It is killed with
// the test at the latest, and whoever it has started.
func start(t *testing.T, node *netns.NS, script string, environment ...string) *running {
	t.Helper()
	s := &running{t: t, ended: make(chan struct{})}
	s.command = exec.Command("sh", "-c", surroundings+script)
	s.command.Dir = filepath.Clean(root)
	s.command.Env = append(os.Environ(), environment...)
	s.command.Stdout, s.command.Stderr = &s.output, &s.output
	s.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Unshareflags: syscall.CLONE_NEWNS}
	netnstest.Check(t, node.Do(s.command.Start))
	go func() {
		s.err = s.command.Wait()
		close(s.ended)
	}()
	t.Cleanup(func() {
		s.kill()
		<-s.ended
	})
	return s
}

// kill ends the shell and all that it has started.
func (s *running) kill() {
	_ = syscall.Kill(-s.command.Process.Pid, syscall.SIGKILL) // it may have ended
}

// interrupt sends SIGINT to the process whose number is in a file.
func interrupt(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(number, syscall.SIGINT); err != nil {
		t.Errorf("interrupt the program: %v", err)
	}
}

func (s *running) wait() error {
	select {
	case <-s.ended:
		return s.err
	case <-time.After(patience):
		return fmt.Errorf("it goes on after %v", patience)
	}
}

// waitFor waits until something is written, or the shell has ended.
func (s *running) waitFor(pattern *regexp.Regexp) bool {
	s.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !pattern.MatchString(s.output.String()) {
		select {
		case <-tick.C:
		case <-s.ended:
			s.t.Errorf("it ended before it wrote %v", pattern)
			return false
		case <-deadline:
			s.t.Errorf("it has not written %v", pattern)
			s.kill()
			return false
		}
	}
	return true
}

// output may be read while it is written.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
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
