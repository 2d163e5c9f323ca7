package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// box is a container that is about to start. The process that becomes it gets this as
// JSON.
type box struct {
	Root           string            // directory with the image and with places to mount at
	Binds          map[string]string // mounted read-only, by place
	Command        []string
	Environment    []string
	Capabilities   []v1.Capability
	ReadOnlyRoot   bool
	NoNewPrivs     bool
	DefaultSeccomp bool
}

// newBox prepares what the container runtime makes of the manifest.
func newBox(t *testing.T, d *deployment, i *image, ca []byte) *box {
	t.Helper()
	limits := d.container().SecurityContext
	if !slices.Contains(limits.Capabilities.Drop, "ALL") {
		t.Fatal("the container keeps capabilities, want it to drop ALL")
	}
	b := &box{
		Root: t.TempDir(), Binds: map[string]string{}, Command: d.command(t, i),
		Capabilities: slices.Clone(limits.Capabilities.Add), ReadOnlyRoot: *limits.ReadOnlyRootFilesystem,
		NoNewPrivs: !*limits.AllowPrivilegeEscalation, DefaultSeccomp: limits.SeccompProfile.Type == v1.SeccompProfileTypeRuntimeDefault,
	}
	for name, value := range d.environment(t) {
		b.Environment = append(b.Environment, name+"="+value)
	}
	account := t.TempDir()
	must(t, os.WriteFile(filepath.Join(account, "token"), []byte(token), 0o600))
	must(t, os.WriteFile(filepath.Join(account, "ca.crt"), ca, 0o644))
	must(t, os.WriteFile(filepath.Join(account, "namespace"), []byte(d.daemonSet.Namespace), 0o644))
	b.Binds["var/run/secrets/kubernetes.io/serviceaccount"] = account
	for _, device := range []string{"null", "zero", "full", "random", "urandom"} {
		b.Binds["dev/"+device] = "/dev/" + device
	}
	b.makePlaces(t)
	must(t, os.Link(i.binary, filepath.Join(b.Root, i.path)))
	return b
}

// makePlaces makes what is mounted over: the image has no directories.
func (b *box) makePlaces(t *testing.T) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(b.Root, "proc"), 0o555))
	must(t, os.MkdirAll(filepath.Join(b.Root, "sys"), 0o555))
	for place, source := range b.Binds {
		info, err := os.Stat(source)
		must(t, err)
		if info.IsDir() {
			must(t, os.MkdirAll(filepath.Join(b.Root, place), 0o755))
			continue
		}
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(b.Root, place)), 0o755))
		must(t, os.WriteFile(filepath.Join(b.Root, place), nil, 0o444))
	}
}

// without takes a capability away.
func (b *box) without(c v1.Capability) *box {
	b.Capabilities = slices.DeleteFunc(b.Capabilities, func(have v1.Capability) bool { return have == c })
	return b
}

// boxVariable is set in the process that becomes a container.
const boxVariable = "SERVICEPLANE_TEST_CONTAINER"

// start starts the container in the node's network, with processes, mounts, host name
// and IPC of its own. A machine that does not let us skips the test.
func (b *box) start(t *testing.T, ns *netns.NS) *proxyProcess {
	t.Helper()
	text, err := json.Marshal(b)
	must(t, err)
	p := &proxyProcess{t: t, ns: ns, cmd: exec.Command(os.Args[0], "-test.run=^TestBecomeAContainer$"), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), boxVariable+"="+string(text))
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC}
	read, write, err := os.Pipe()
	must(t, err)
	defer read.Close()
	p.cmd.ExtraFiles = []*os.File{write} // descriptor complaints
	err = ns.Do(p.cmd.Start)
	_ = write.Close()
	netnstest.Check(t, privilege(err))
	p.attend()
	complaint, err := io.ReadAll(read)
	must(t, err)
	if len(complaint) > 0 {
		netnstest.Check(t, privilege(errors.New(string(complaint))))
	}
	return p
}

// privilege marks the errors of a machine on which containers cannot be made.
func privilege(err error) error {
	if err == nil || !strings.Contains(err.Error(), unix.EPERM.Error()) {
		return err
	}
	return fmt.Errorf("%w: make a container: %w", netns.ErrPrivilege, err)
}

// contents are the files in the container's root, with what a write would change.
func (b *box) contents(t *testing.T) string {
	t.Helper()
	var lines []string
	must(t, filepath.WalkDir(b.Root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			lines = append(lines, fmt.Sprintln(strings.TrimPrefix(path, b.Root), info.Mode(), info.Size(), info.ModTime()))
		}
		return err
	}))
	return strings.Join(lines, "")
}

// expectConfined wants a container to have exactly the rights of the box.
func (b *box) expectConfined(t *testing.T, p *proxyProcess) {
	t.Helper()
	set := fmt.Sprintf("%016x", capabilitySet(b.Capabilities))
	want := map[string]string{
		"CapBnd": set, "CapPrm": set, "CapEff": set, "CapInh": fmt.Sprintf("%016x", 0), "CapAmb": fmt.Sprintf("%016x", 0),
		"NoNewPrivs": "1", "Seccomp": "2", // SECCOMP_MODE_FILTER of linux/seccomp.h
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	must(t, err)
	got := map[string]string{}
	for line := range strings.Lines(string(status)) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), ":"); want[name] != "" {
			got[name] = strings.TrimSpace(value)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("the process has %v, want %v", got, want)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", p.cmd.Process.Pid))
	must(t, err)
	for _, place := range []string{"/", "/proc/sys", "/sys"} {
		if !strings.Contains(string(mounts), " "+place+" ro,") {
			t.Errorf("%s is writable, want it read-only; mounts are\n%s", place, mounts)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
