package ebpf_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestACgroupComesAndGoes: one that matches a pattern may come after the start, go, and come again; a
// Condition names what matches none. Processes of others are translated all the time.
func TestACgroupComesAndGoes(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	own, above := n.sockets.Cgroups[0], bpftest.NewCgroup(t)
	late := filepath.Join(above, "kubepods.slice")
	n.sockets.Cgroups = []string{filepath.Join(above, "kubepods*"), own}
	pod, endpoint := n.world.LocalPods[0], n.world.RemotePods[0]
	i := newInstance(t, n, proxier.DefaultNames(), 0x4000, "10.96.7.1", endpoint)
	translated := func() uint64 {
		t.Helper()
		counts, err := i.engine.SocketCounts()
		netnstest.Check(t, err)
		return counts.Translated
	}
	for range 2 {
		i.mustTranslate(t, pod, endpoint)
		if got := fmt.Sprint(i.engine.Abilities().Conditions()); !strings.Contains(got, "kubepods*") {
			t.Errorf("Conditions: %s, want one about kubepods*", got)
		}
		netnstest.Check(t, os.Mkdir(late, 0o700))
		netnstest.Check(t, i.engine.Retry())
		if got := i.engine.Abilities().Conditions(); len(got) > 0 {
			t.Errorf("Conditions: %v, want none", got)
		}
		before := translated()
		netnstest.Check(t, pod.Do(func() error { return connectWithin(late, i.vip.Addr().String()) }))
		if got := translated() - before; got != 1 {
			t.Errorf("%d sockets translated of a process in %s, want 1", got, late)
		}
		i.mustTranslate(t, pod, endpoint)
		poll.Until(t, "the process has left its cgroup", func() bool { return os.Remove(late) == nil })
		netnstest.Check(t, i.engine.Retry())
	}
	verified, err := i.Verify(t.Context())
	netnstest.Check(t, err)
	for family, v := range verified {
		if v.Err != nil || v.Total > 0 {
			t.Errorf("%v: %+v, want no difference", family, v)
		}
	}
}

// connectWithin opens a TCP connection to port 80 of an address, by a process in a cgroup.
func connectWithin(cgroup, addr string) error {
	dir, err := os.Open(cgroup)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	client := exec.Command("bash", "-c", "exec 3<>/dev/tcp/"+addr+"/80")
	client.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if output, err := client.CombinedOutput(); err != nil {
		return fmt.Errorf("connect to %s: %w: %s", addr, err, output)
	}
	return nil
}
