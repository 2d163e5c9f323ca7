package nodeproxy

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

var updateSpctl = flag.Bool("update", false, "write what spctl prints to testdata/spctl.txt")

// spctlRuns runs the command at a socket, and returns its output.
func spctlRuns(t *testing.T, socket string, args ...string) string {
	t.Helper()
	var out bytes.Buffer
	command := spctl.New(spctl.Options{Address: "unix://" + socket})
	command.SetArgs(args)
	command.SetOut(&out)
	if err := command.ExecuteContext(t.Context()); err != nil {
		t.Errorf("spctl %q = %v", args, err)
	}
	return out.String()
}

// terminal is a shell that runs the program spctl, and what it showed.
type terminal struct {
	t      *testing.T
	folder string // the current one
	path   string
	text   strings.Builder
}

// newTerminal builds spctl.
func newTerminal(t *testing.T, socket string) *terminal {
	t.Helper()
	folder := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", folder, "./cmd/spctl").CombinedOutput(); err != nil {
		t.Fatalf("build spctl: %v\n%s", err, out)
	}
	bin := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\nexec %s/spctl --address=unix://%s \"$@\"\n", folder, socket)
	netnstest.Check(t, os.WriteFile(filepath.Join(bin, "spctl"), []byte(script), 0o700))
	return &terminal{t: t, folder: t.TempDir(), path: bin}
}

func (s *terminal) command(line string) *exec.Cmd {
	command := exec.CommandContext(s.t.Context(), "sh", "-c", line)
	command.Dir, command.Env = s.folder, append(os.Environ(), "PATH="+s.path+":"+os.Getenv("PATH"))
	return command
}

// run runs a line, and adds it to the text with its output and exit status.
func (s *terminal) run(line string) {
	s.t.Helper()
	command := s.command(line)
	out, _ := command.CombinedOutput() // the text has the exit status
	s.add(line, string(out), command.ProcessState.ExitCode())
}

func (s *terminal) add(line, out string, status int) {
	fmt.Fprintf(&s.text, "$ %s\n%s", line, out)
	if status != 0 {
		fmt.Fprintf(&s.text, "exit status %d\n", status)
	}
	s.text.WriteString("\n")
}

// during runs a line that prints first when it begins, and repeats a change until it ends.
func (s *terminal) during(line string, change func()) {
	s.t.Helper()
	var out output
	command := s.command(line)
	command.Stdout, command.Stderr = &out, &out
	netnstest.Check(s.t, command.Start())
	ended := make(chan struct{})
	go func() {
		_ = command.Wait() // the text has the exit status
		close(ended)
	}()
	poll.Until(s.t, "output of "+line, func() bool { return out.String() != "" })
	poll.Until(s.t, "the end of "+line, func() bool {
		change()
		select {
		case <-ended:
			return true
		default:
			return false
		}
	})
	s.add(line, out.String(), command.ProcessState.ExitCode())
}

var (
	spctlTimes     = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z|\b\d\d:\d\d:\d\d\b`)
	spctlAges      = regexp.MustCompile(`\b\d+[smhd] ago\b`)
	spctlDurations = regexp.MustCompile(`\b[0-9.]+(ns|µs|ms|s)\b`)
	spctlHandles   = regexp.MustCompile(`handle \d+`)
	spctlVersion   = regexp.MustCompile(`(Proxy: +nodeproxy) .*`)
	spctlVariable  = regexp.MustCompile(`(?m)^.*(TIME|AGO|DURATION|STARTED|LAST-SYNC|SINCE).*$`)
	spctlGaps      = regexp.MustCompile(` {2,}`)
)

// shown returns the text without what differs from run to run.
func (s *terminal) shown(socket string) string {
	text := strings.ReplaceAll(s.text.String(), socket, "/run/serviceplane/debug.sock")
	text = spctlAges.ReplaceAllString(spctlTimes.ReplaceAllString(text, "TIME"), "AGO")
	text = spctlHandles.ReplaceAllString(text, "handle N")
	text = spctlVersion.ReplaceAllString(spctlDurations.ReplaceAllString(text, "DURATION"), "$1 VERSION")
	return spctlVariable.ReplaceAllStringFunc(text, func(line string) string { return spctlGaps.ReplaceAllString(line, "  ") })
}

// documented returns the five commands of docs/DEBUGGING.md.
func documented(t *testing.T) (lines []string) {
	t.Helper()
	text, err := os.ReadFile("../../docs/DEBUGGING.md")
	netnstest.Check(t, err)
	_, section, _ := strings.Cut(string(text), "in five commands\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, found := range regexp.MustCompile(`(?m)^(spctl [^#\n]*[^# \n]) *#`).FindAllStringSubmatch(section, -1) {
		lines = append(lines, found[1])
	}
	if len(lines) != 5 {
		t.Fatalf("docs/DEBUGGING.md has the commands %q, want five", lines)
	}
	return lines
}

// TestSpctl compares what the program spctl shows of a node with testdata/spctl.txt.
func TestSpctl(t *testing.T) {
	if inVM() {
		t.Skip("the machine has no Go to build spctl")
	}
	t.Parallel()
	c, d := newSmall(t), newDirectory(t)
	d.write("idle.yaml", "apiVersion: v1\nkind: Service\nmetadata: {name: idle, namespace: shop}\nspec: {clusterIP: 10.96.0.11, ports: [{name: dns, port: 53, protocol: UDP}]}\n")
	socket := filepath.Join(t.TempDir(), "debug.sock")
	p := start(t, c.node, "--manifests="+d.path, "--state-dir="+t.TempDir(), "--canary=off", "--debug-socket="+socket, "--count-connections")
	p.waitHealthy()
	c.expectNow("pod-1")
	waitSocket(t, socket)
	s := newTerminal(t, socket)
	client := func() {
		_, _ = netns.Ask(t.Context(), c.pods[0], "tcp", netip.MustParseAddrPort(vip4), netns.AskOptions{Timeout: time.Second}) // may be dropped
	}
	var traces []string // with a rule that drops the packet
	for _, line := range documented(t) {
		if strings.HasPrefix(line, "spctl trace ") {
			traces = append(traces, line)
			continue
		}
		s.run(line)
	}
	for _, line := range []string{
		"spctl counts", "spctl rules web", "spctl services", "spctl services --no-endpoints", "spctl services 30080 -o yaml", "spctl explain 192.0.2.1 192.0.2.10:30080",
		"spctl explain 10.244.1.2 10.96.0.11:53/UDP -o json", "spctl trace 192.0.2.10 10.96.0.10:80 --send",
		"spctl trace 10.244.1.2 10.96.0.10:80 --send --netns " + c.pods[0].Path(), "spctl wait web --services 1 --timeout 0",
		"spctl syncs | awk '$2 == \"IPv4\" {print $2, $6; exit}'", "spctl state > before.json", "spctl diff before.json",
	} {
		s.run(line)
	}
	s.during("spctl trace 10.244.1.2 10.96.0.10:80 --timeout 1m", client)
	c.nft("add table ip firewall; add chain ip firewall forward { type filter hook forward priority 0; }; add rule ip firewall forward tcp dport 8080 drop")
	for _, line := range traces {
		s.during(line, client)
	}
	s.during("spctl watch --count=1", func() {
		d.write("more.yaml", strings.NewReplacer("name: web-v4", "name: idle-v4", "service-name: web", "service-name: idle", "port: 8080", "name: dns, port: 5353, protocol: UDP",
			"metadata: {", "metadata: {namespace: shop, ").Replace(strings.Split(webSlices(1), "---")[0]))
	})
	s.run("spctl diff before.json")
	got := strings.ReplaceAll(s.shown(socket), c.pods[0].Path(), "/run/netns/pod-1")
	if *updateSpctl {
		netnstest.Check(t, os.WriteFile("testdata/spctl.txt", []byte(got), 0o600))
	}
	want, err := os.ReadFile("testdata/spctl.txt")
	netnstest.Check(t, err)
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("testdata/spctl.txt (-want +got), -update writes it:\n%s", diff)
	}
}
