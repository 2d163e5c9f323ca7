package ebpf_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// path returns the only path that a pattern finds below the folder of an instance's IPv4 family.
func (n *node) path(t *testing.T, pattern string) string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(n.sockets.BPFFS, "serviceplane/*/ip4/v1", pattern))
	netnstest.Check(t, err)
	if len(paths) != 1 {
		t.Fatalf("%s finds %v, want one path", pattern, paths)
	}
	return paths[0]
}

// pinned opens a map as another program does.
func (n *node) pinned(t *testing.T, name string) *bpf.Map {
	t.Helper()
	m, err := bpf.LoadPinnedMap(n.path(t, name), nil)
	netnstest.Check(t, err)
	t.Cleanup(func() { netnstest.Check(t, bpfx.Close(m)) })
	return m
}

// Verify finds what another program did, and a full sync repairs it.
func TestVerifyFindsWhatAnotherProgramDid(t *testing.T) {
	t.Parallel()
	whole, n := t, newNode(t)
	n.start(t, n.world.RemotePods...)
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	for _, c := range []struct {
		name   string
		damage func(t *testing.T)
		want   string // the difference
	}{
		{"nothing", func(*testing.T) {}, ""},
		{"an element is deleted", func(t *testing.T) {
			m, key := n.pinned(t, "maps/frontends"), make([]byte, 8)
			netnstest.Check(t, errors.Join(m.NextKey(nil, key), m.Delete(key)))
		}, "element 10.96.0.10:80/TCP of map frontends of IPv4: missing"},
		{"an element is added", func(t *testing.T) {
			netnstest.Check(t, n.pinned(t, "maps/frontends").Put([]byte{10, 96, 0, 77, 0, 80, 6, 0}, make([]byte, 8)))
		}, "element 10.96.0.77:80/TCP of map frontends of IPv4: unexpected"},
		{"an element leads outside of the maps", func(t *testing.T) {
			m, key := n.pinned(t, "maps/frontends"), make([]byte, 8)
			netnstest.Check(t, errors.Join(m.NextKey(nil, key), m.Put(key, []byte{255, 255, 255, 0, 0, 0, 0, 0})))
		}, "element 10.96.0.10:80/TCP of map frontends of IPv4: different"},
		{"an endpoint is changed", func(t *testing.T) {
			m := n.pinned(t, "maps/endpoints")
			for i := range m.MaxEntries() {
				value := make([]byte, 8)
				netnstest.Check(t, m.Lookup(i, value))
				if value[0] != 0 { // an address
					value[0]++
					netnstest.Check(t, m.Put(i, value))
				}
			}
		}, "element 10.96.0.10:80/TCP of map frontends of IPv4: different"},
		{"a link is detached", func(t *testing.T) {
			l, err := link.LoadPinnedLink(n.path(t, "links-*/connect4-*"), nil)
			netnstest.Check(t, err)
			netnstest.Check(t, errors.Join(l.(interface{ Detach() error }).Detach(), bpfx.Close(l)))
		}, "link of program connect4 to cgroup " + n.sockets.Cgroups[0] + ": different"},
		{"a link is detached, which a process that died was moving", func(t *testing.T) {
			dir := n.path(t, "links-*")
			l, err := link.LoadPinnedLink(n.path(t, "links-*/connect4-*"), nil)
			netnstest.Check(t, err)
			netnstest.Check(t, errors.Join(l.(interface{ Detach() error }).Detach(), bpfx.Close(l), os.Rename(dir, filepath.Join(filepath.Dir(dir), "links-new"))))
		}, "link of program connect4 to cgroup " + n.sockets.Cgroups[0] + ": different"},
		{"a program is unpinned", func(t *testing.T) {
			netnstest.Check(t, os.Remove(n.path(t, "links-*/program-connect4")))
		}, "link of program connect4 to cgroup " + n.sockets.Cgroups[0] + ": different"},
		{"a link is unpinned", func(t *testing.T) {
			netnstest.Check(t, os.Remove(n.path(t, "links-*/getpeername4-*")))
		}, "link of program getpeername4 to cgroup " + n.sockets.Cgroups[0] + ": missing"},
		{"a map is unpinned", func(t *testing.T) { netnstest.Check(t, os.Remove(n.path(t, "maps/services"))) }, "/ip4/v1/maps/services: missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.damage(t)
			found, err := n.Verify(t.Context())
			netnstest.Check(t, err)
			v4, v6 := found[v1.IPv4Protocol], found[v1.IPv6Protocol]
			netnstest.Check(t, errors.Join(v4.Err, v6.Err))
			var text strings.Builder
			for _, d := range v4.Differences {
				text.WriteString(d.String() + "\n")
			}
			if !strings.Contains(text.String(), c.want) || (v4.Total > 0) != (c.want != "") || v6.Total > 0 {
				t.Errorf("differences\n%s%v\nwant %q", &text, v6.Differences, c.want)
			}
			if v4.Checked < 10 {
				t.Errorf("%d objects checked, want maps, links, frontends and rules", v4.Checked)
			}
			n.stop() // a new process compares everything, as each full sync does
			n.start(whole, n.world.RemotePods...)
			netnstest.Check(t, proxiertest.Sync(t.Context(), n))
			found, err = n.Verify(t.Context())
			netnstest.Check(t, err)
			for family, v := range found {
				if !v.Agrees() {
					t.Errorf("%s after a full sync: error %v, differences %v", family, v.Err, v.Differences)
				}
			}
			n.mustTranslate(t)
		})
	}
}

// flushRules empties the chains of the table, which has the name of a folder.
func (n *node) flushRules(t *testing.T) {
	t.Helper()
	name := filepath.Base(filepath.Dir(filepath.Dir(n.path(t, ""))))
	netnstest.Check(t, n.world.Node.Do(func() error {
		return exec.CommandContext(t.Context(), "nft", "flush", "table", "ip", name).Run()
	}))
}

func (n *node) mustTranslate(t *testing.T) {
	t.Helper()
	before := n.translated(t, v1.IPv4Protocol)
	_, err := n.world.LocalPods[0].Ask(t.Context(), "tcp", vip(v1.IPv4Protocol), proxiertest.AskOptions{})
	if after := n.translated(t, v1.IPv4Protocol); err != nil || after.Translated != before.Translated+1 {
		t.Errorf("error %v, %d sockets translated, want 1", err, after.Translated-before.Translated)
	}
}

// Full syncs pin maps again, without a restart.
func TestFullSyncsPinMapsAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t, n.world.RemotePods[0])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	netnstest.Check(t, os.Remove(n.path(t, "maps/endpoints")))
	n.flushRules(t) // which causes a full sync, as soon as the kernel has reported it
	poll.Until(t, "the map is pinned", func() bool {
		_, err := os.Stat(filepath.Join(n.path(t, ""), "maps", "endpoints"))
		return err == nil
	})
	n.mustTranslate(t)
}

// TestConditionOfSockets: Status says why sockets are not translated, while they are not.
func TestConditionOfSockets(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	good := n.sockets
	n.sockets.BPFFS = t.TempDir()
	for _, c := range []struct {
		sockets ebpf.Sockets
		want    int // Conditions
	}{{n.sockets, len(families)}, {good, 0}} {
		n.sockets = c.sockets
		n.start(t, n.world.RemotePods[0])
		netnstest.Check(t, proxiertest.Sync(t.Context(), n))
		conditions := n.Status().Conditions
		if len(conditions) != c.want {
			t.Errorf("conditions %+v, want %d", conditions, c.want)
		}
		for _, one := range conditions {
			if one.Type != proxier.ConditionSockets || one.Family == "" || one.Since.IsZero() || !strings.Contains(one.Message, "is not a BPF file system") {
				t.Errorf("condition %+v, want one of sockets that says why", one)
			}
		}
		found, err := n.Verify(t.Context())
		netnstest.Check(t, err)
		for family, v := range found {
			if !v.Agrees() {
				t.Errorf("%s: error %v, differences %v", family, v.Err, v.Differences)
			}
		}
		n.stop()
	}
}

// A cleanup finishes the cleanup of a process that died when the maps and links were gone.
func TestCleanupFinishesAnother(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t, n.world.RemotePods[0])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	n.stop()
	for _, family := range []string{"ip4", "ip6"} {
		netnstest.Check(t, os.RemoveAll(filepath.Join(n.sockets.BPFFS, "serviceplane", proxier.DefaultNames().Table, family, "v1")))
	}
	netnstest.Check(t, n.Cleanup(t.Context()))
	if _, err := os.Stat(filepath.Join(n.sockets.BPFFS, "serviceplane")); err == nil {
		t.Error("Cleanup left the folders of the instance")
	}
}

// TestWithoutPinsNothingIsTranslated: without a process and without rules, sockets are led to the endpoints that
// the process knew, until somebody removes the folder of the pins, as docs/OPERATING.md says.
func TestWithoutPinsNothingIsTranslated(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.start(t, n.world.RemotePods[0])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	n.stop()
	netnstest.Check(t, n.world.Node.Do(func() error { return exec.CommandContext(t.Context(), "nft", "flush", "ruleset").Run() }))
	connect := func(family v1.IPFamily) error {
		_, err := n.world.LocalPods[0].Ask(t.Context(), "tcp", vip(family), proxiertest.AskOptions{Timeout: time.Second})
		return err
	}
	for _, family := range families {
		netnstest.Check(t, connect(family))
	}
	netnstest.Check(t, os.RemoveAll(filepath.Join(n.sockets.BPFFS, "serviceplane")))
	for _, family := range families { // the kernel detaches in the background
		poll.Until(t, "no socket is led to an endpoint", func() bool { return connect(family) != nil })
	}
}

// RemoveSockets leaves the rules, which then do everything. It does nothing while a process has the sockets, or
// where there are none.
func TestRemoveSockets(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	config := ebpf.Config{Config: nftables.Config{Config: n.world.Config()}, Sockets: n.sockets}
	if err := ebpf.RemoveSockets(config); err != nil {
		t.Errorf("without sockets: %v", err)
	}
	n.start(t, n.world.RemotePods[0])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	n.mustTranslate(t)
	if err := ebpf.RemoveSockets(config); !errors.Is(err, proxier.ErrInUse) {
		t.Errorf("while a process uses them: error %v, want ErrInUse", err)
	}
	n.mustTranslate(t)
	n.stop()
	netnstest.Check(t, ebpf.RemoveSockets(config))
	if _, err := os.Stat(filepath.Join(n.sockets.BPFFS, "serviceplane")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what was pinned is there: error %v", err)
	}
	poll.Until(t, "the rules serve the VIP", func() bool { // the kernel detaches in the background
		return peer(t, n.world.LocalPods[0], false, vip(v1.IPv4Protocol)) == vip(v1.IPv4Protocol)
	})
	config.Sockets.BPFFS = filepath.Join(t.TempDir(), "missing")
	if err := ebpf.RemoveSockets(config); err != nil {
		t.Errorf("without a BPF file system: %v", err)
	}
	if _, err := os.Stat(config.Sockets.BPFFS); !errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.EPERM) {
		t.Errorf("RemoveSockets has made %s", config.Sockets.BPFFS)
	}
}
