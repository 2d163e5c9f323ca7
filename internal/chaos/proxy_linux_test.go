package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// program is a build of nodeproxy, with the version that it is of.
type program struct{ path, version string }

// builds builds this version and the one before, once for all engines.
type builds struct {
	dir          string
	this, before func() program
}

// In a virtual machine there is no Go: this directory has the programs.
const inVM = "/t/files"

func newBuilds(t *testing.T) *builds {
	t.Helper()
	b := &builds{dir: t.TempDir()}
	b.this = sync.OnceValue(func() program {
		if p := filepath.Join(*programs, "nodeproxy"); exists(p) {
			return program{p, "this version"}
		}
		return program{b.build(t, "../..", "nodeproxy"), "this version"}
	})
	b.before = sync.OnceValue(func() program {
		if p := filepath.Join(*programs, "nodeproxy.before"); exists(p) {
			return program{p, "the version before"}
		}
		tree := filepath.Join(b.dir, "tree")
		if err := os.Mkdir(tree, 0o700); err != nil {
			t.Fatal(err)
		}
		script := exec.CommandContext(t.Context(), "sh", "-c", `git rev-parse --short "$1" && git -C "$(git rev-parse --show-toplevel)" archive "$1" >"$2.tar" && tar -xf "$2.tar" -C "$2"`, "sh", *before, tree)
		var faults strings.Builder
		script.Stderr = &faults
		out, err := script.Output()
		if err != nil {
			t.Logf("no version before: git archive %s: %v: %s; this version instead", *before, err, strings.TrimSpace(faults.String()))
			return b.this()
		}
		return program{b.build(t, tree, "before"), strings.TrimSpace(string(out))}
	})
	return b
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

func (b *builds) build(t *testing.T, root, name string) string {
	t.Helper()
	path, script := filepath.Join(b.dir, name), filepath.Join(root, "node/nodeproxy/deploy/build.sh")
	if !exists(script) { // in older versions
		script = filepath.Join(root, "nodeproxy/deploy/build.sh")
	}
	if out, err := exec.CommandContext(t.Context(), script, path).CombinedOutput(); err != nil {
		t.Fatalf("build nodeproxy: %v\n%s", err, out)
	}
	return path
}

// proxy is a process of nodeproxy.
type proxy struct {
	*exec.Cmd

	log   string
	ended chan struct{}
	err   error // once it has ended
}

// start starts the proxy, with more flags than those of the engine.
func (g *game) start(p program, flags ...string) {
	g.t.Helper()
	g.starts++
	g.proxy = &proxy{ended: make(chan struct{}), log: filepath.Join(g.dir, fmt.Sprintf("nodeproxy-%d.log", g.starts))}
	args := append([]string{
		"--kubeconfig=" + g.config, "--hostname-override=" + nodeName, "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48", "--nodeport-addresses=all",
		"--conntrack-max-per-core=0", "--healthz-bind-address=127.0.0.1", "--debug-socket=" + filepath.Join(g.dir, "debug.sock"), "--state-dir=" + g.dir,
	}, slices.Concat(g.engine.flags, g.flags, flags)...)
	g.proxy.Cmd = exec.Command(p.path, args...) // which outlives the test's context until the test has seen it end
	g.proxy.Env = append(os.Environ(), "PATH="+g.path)
	output, err := os.Create(g.proxy.log)
	if err != nil {
		g.t.Fatal(err)
	}
	defer output.Close()
	g.proxy.Stdout, g.proxy.Stderr = output, output
	if err := g.Node.Do(g.proxy.Start); err != nil {
		g.t.Fatalf("start nodeproxy: %v", err)
	}
	run := g.proxy
	go func() {
		run.err = run.Wait()
		close(run.ended)
	}()
	g.t.Cleanup(func() { _ = run.Process.Kill(); <-run.ended })
}

// before is the version before, or this one if that lacks a flag.
func (g *game) before() program {
	g.t.Helper()
	p := g.builds.before()
	help, err := exec.CommandContext(g.t.Context(), p.path, "--help").Output()
	if err != nil {
		g.t.Fatalf("ask %s for its flags: %v", p.version, err)
	}
	for _, flag := range slices.Concat(g.engine.flags, g.flags) {
		if name, _, _ := strings.Cut(flag, "="); !strings.Contains(string(help), name) {
			g.t.Logf("%s has no flag %s: this version instead", p.version, name)
			return g.builds.this()
		}
	}
	return p
}

// kill ends the proxy at once.
func (g *game) kill() {
	g.t.Helper()
	_ = g.proxy.Process.Kill() // it may have ended
	<-g.proxy.ended
}

// stop asks the proxy to end. One whose connections end with it gets time for them: see leave.
func (g *game) stop() {
	g.t.Helper()
	if err := g.proxy.Process.Signal(syscall.SIGTERM); err != nil {
		g.t.Fatalf("send SIGTERM: %v", err)
	}
	if g.engine.lingers {
		g.leaving = append(g.leaving, g.proxy)
		return
	}
	g.mustEnd(g.proxy)
}

// mustEnd waits for a process that was asked to end.
func (g *game) mustEnd(p *proxy) {
	g.t.Helper()
	if !poll.Soon(func() bool {
		select {
		case <-p.ended:
			return true
		default:
			return false
		}
	}) {
		g.t.Fatalf("nodeproxy has not ended %v after SIGTERM\n%s", poll.Timeout, tail(p.log))
	}
	if p.err != nil {
		g.t.Errorf("nodeproxy after SIGTERM: %v, want exit code 0\n%s", p.err, tail(p.log))
	}
}

// leave lets proxies end that were asked to: clients close their connections.
func (g *game) leave() {
	g.t.Helper()
	if len(g.leaving) == 0 {
		return
	}
	g.clients.renew()
	for _, p := range g.leaving {
		g.mustEnd(p)
	}
	g.leaving = nil
}

// tail returns the last lines of a file.
func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(string(text), "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// toolPath makes a directory with the programs of one variant of iptables, and nft.
func toolPath(t *testing.T, variant string) string {
	t.Helper()
	dir := t.TempDir()
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, part := range []string{"", "-save", "-restore"} {
			program, err := exec.LookPath(family + "-" + variant + part)
			if err != nil {
				continue // the engine says so if it needs it
			}
			for _, name := range []string{family + "-" + variant + part, family + part} {
				if err := os.Symlink(program, filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return dir
}

// shell runs a command on the node, as another program.
func (g *game) shell(command string) {
	g.t.Helper()
	shell := exec.CommandContext(g.t.Context(), "sh", "-c", "set -e\n"+command)
	shell.Env = append(os.Environ(), "PATH="+g.path+":"+os.Getenv("PATH"), "BPFFS="+g.bpffs)
	var out []byte
	err := g.Node.Do(func() (err error) { out, err = shell.CombinedOutput(); return err })
	if err != nil && !errors.Is(err, context.Canceled) {
		g.t.Fatalf("%s: %v\n%s", command, err, out)
	}
}

// wait lets time pass: what happens next comes at any moment of what the proxy does.
func (g *game) wait(atMost time.Duration) {
	pause.For(g.t.Context(), time.Duration(g.dice.Int64N(int64(atMost))))
}
