package nodeproxy

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// The debug socket is there while the proxy runs, for root only. The socket of a killed process is replaced, and
// the socket of a running one is not.
func TestTheDebugSocket(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	state := filepath.Join(t.TempDir(), "state")
	socket := filepath.Join(state, "debug.sock")
	flags := []string{"--manifests=" + d.path, "--state-dir=" + state, "--metrics-bind-address="}
	first := start(t, c.node, flags...)
	first.waitHealthy()
	waitSocket(t, socket)
	if got := spctlRuns(t, socket, "services"); !strings.Contains(got, "10.96.0.10") {
		t.Errorf("services are\n%swant the VIP of the Service", got)
	}
	info, err := os.Stat(socket)
	if netnstest.Check(t, err); info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("mode of the socket is %v, want 0600", info.Mode())
	}

	other := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--debug-socket="+socket, "--instance=edge", "--nftables-masquerade-bit=15",
		"--metrics-bind-address=", "--healthz-bind-address=127.0.0.1:20256")
	other.waitOutput("another process listens on "+socket, "the first sync is done")
	first.kill()
	other.waitOutput("server answers again") // a process that the first one was about to start may have its socket for a moment
	waitSocket(t, socket)
	if err := other.signal(syscall.SIGTERM); err != nil {
		t.Errorf("the second instance ends with %v, want exit code 0", err)
	}
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket after SIGTERM: %v, want it gone", err)
	}

	last := start(t, c.node, flags...)
	last.waitHealthy()
	waitSocket(t, socket)
	last.kill()
	cleanUp(t, c.node, flags...)
	if _, err := os.Stat(state); !os.IsNotExist(err) {
		t.Errorf("the directory after --cleanup: %v, want it gone", err)
	}
}

// waitSocket waits until a process listens on a socket.
func waitSocket(tb testing.TB, path string) {
	tb.Helper()
	poll.Until(tb, "a process at "+path, func() bool { return dialsSocket(path) })
}

func dialsSocket(path string) bool {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// socketOfRoot tells the part of a test that nobody runs where root listens.
const socketOfRoot = "SERVICEPLANE_TEST_SOCKET"

// The debug socket refuses others, even if the file's mode lets them connect.
func TestTheDebugSocketRefusesOthers(t *testing.T) {
	read := func(socket string) (int, error) {
		conn, err := net.Dial("unix", socket)
		netnstest.Check(t, err)
		defer conn.Close()
		return conn.Read(make([]byte, 1))
	}
	if socket := os.Getenv(socketOfRoot); socket != "" { // as nobody
		if n, err := read(socket); n > 0 || err == nil {
			t.Errorf("another user reads %d bytes, %v, want the connection closed", n, err)
		}
		return
	}
	dir, err := os.MkdirTemp("", "socket") //nolint:usetesting // nobody else can enter t.TempDir
	netnstest.Check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	netnstest.Check(t, os.Chmod(dir, 0o755))
	socket := filepath.Join(dir, "debug.sock")
	listener, err := listenOnSocket(t.Context(), "", socket)
	netnstest.Check(t, err)
	netnstest.Check(t, os.Chmod(socket, 0o777))
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for conn, err := listener.Accept(); err == nil; conn, err = listener.Accept() {
			_, _ = conn.Write([]byte("x"))
			_ = conn.Close()
		}
	})
	t.Cleanup(accepting.Wait)
	t.Cleanup(func() { _ = listener.Close() })
	if n, err := read(socket); n != 1 {
		t.Errorf("root reads %d bytes, %v, want 1", n, err)
	}
	t.Setenv(socketOfRoot, socket)
	netnstest.Unprivileged(t, func(*testing.T) {})
}

// The socket's folder is for its user only if the folder is new. The folder stays, and the socket does not.
func TestTheSocketsFolder(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "new")
	socket := filepath.Join(folder, "debug.sock")
	listener, err := listenOnSocket(t.Context(), "", socket)
	netnstest.Check(t, err)
	info, err := os.Stat(folder)
	if netnstest.Check(t, err); info.Mode() != os.ModeDir|0o700 {
		t.Errorf("mode of the folder is %v, want 0700", info.Mode())
	}
	netnstest.Check(t, listener.Close())
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("the folder has %v, %v, want nothing", left, err)
	}
}

// TestAFileThatIsNoSocketStays.
func TestAFileThatIsNoSocketStays(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "debug.sock")
	netnstest.Check(t, os.WriteFile(path, []byte("mine"), 0o600))
	if _, err := listenOnSocket(t.Context(), "", path); err == nil || !strings.Contains(err.Error(), "--debug-socket") {
		t.Errorf("listenOnSocket = %v, want an error that names the flag", err)
	}
	if text, err := os.ReadFile(path); string(text) != "mine" {
		t.Errorf("the file has %q, %v, want its text", text, err)
	}
}

// One of many starters listens at the socket of a process that was killed, time after time: the others get the
// error, nobody removes the socket, and connections reach it.
func TestOneOfManyStartersListens(t *testing.T) {
	t.Parallel()
	const starters, rounds = 16, 100
	folder := t.TempDir()
	socket := filepath.Join(folder, "debug.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	netnstest.Check(t, err)
	dead.SetUnlinkOnClose(false)
	netnstest.Check(t, dead.Close())
	for round := range rounds {
		var starting sync.WaitGroup
		listening := make(chan net.Listener, starters)
		for range starters {
			starting.Go(func() {
				listener, err := listenOnSocket(t.Context(), "", socket)
				if err == nil {
					listening <- listener
				} else if !errors.Is(err, errListens) {
					t.Errorf("listenOnSocket = %v, want %v", err, errListens)
				}
			})
		}
		starting.Wait()
		close(listening)
		if len(listening) != 1 || !dialsSocket(socket) {
			t.Fatalf("round %d: %d processes listen, and a client connects: %v; want one that can be reached", round, len(listening), dialsSocket(socket))
		}
		listener := <-listening
		if round%2 == 0 { // killed: the lock ends, and the files stay
			private := listener.(*privateListener)
			netnstest.Check(t, private.UnixListener.Close())
			private.release()
			poll.Until(t, "nobody listens: a child that another test has forked has the socket until it executes a program", func() bool { return !dialsSocket(socket) })
			continue
		}
		netnstest.Check(t, listener.Close())
	}
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("the folder has %v, %v, want nothing", left, err)
	}
}

// The debug socket traces packets that it sends itself, and names the rule that drops one.
func TestTheSocketTracesPackets(t *testing.T) {
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	state := filepath.Join(t.TempDir(), "state")
	socket := filepath.Join(state, "debug.sock")
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+state, "--metrics-bind-address=", "--debug-bind-address=127.0.0.1:10290")
	p.waitHealthy()
	poll.Until(t, "the socket", func() bool { return dialsSocket(socket) })
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", socket)
	}}}
	query := url.Values{"protocol": {"TCP"}, "source": {"192.0.2.1"}, "destination": {vip4}, "origin": {"outside"}, "send": {"true"}, "netns": {c.client.Path()}}
	trace := func() (answer struct {
		Verdict, By, Sent string
		Agrees            bool
		Steps             []struct{ Table string }
	},
	) {
		t.Helper()
		response, err := client.Post("http://localhost/trace?"+query.Encode(), "", nil)
		netnstest.Check(t, err)
		defer func() { _ = response.Body.Close() }()
		netnstest.Check(t, json.NewDecoder(response.Body).Decode(&answer))
		return answer
	}
	if got := trace(); got.Verdict != "translated" || !got.Agrees || len(got.Steps) == 0 {
		t.Errorf("%+v, want it translated", got)
	}
	c.nft("add table inet foreign; add chain inet foreign strict { type filter hook forward priority 0; }; add rule inet foreign strict tcp dport 8080 drop")
	if got := trace(); got.Verdict != "dropped" || got.Agrees || !strings.Contains(got.By, "'tcp dport 8080 drop'") || !strings.Contains(got.By, "table inet foreign: not a rule of this proxy") {
		t.Errorf("%+v, want it dropped by the rule", got)
	}
}
