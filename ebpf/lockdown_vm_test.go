//go:build vm

package ebpf_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestUnderLockdown: sockets are translated and ended while kernel lockdown forbids that anybody reads the kernel's
// memory (kernel_lockdown(7)). It cannot be undone: run it alone, in a machine that ends with it.
func TestUnderLockdown(t *testing.T) {
	dir := t.TempDir()
	netnstest.Check(t, unix.Mount("none", dir, "securityfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	file := filepath.Join(dir, "lockdown")
	netnstest.Check(t, os.WriteFile(file, []byte("confidentiality"), 0))
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "[confidentiality]") {
		t.Fatalf("lockdown is %q, error %v", text, err)
	}
	n := newUDPNode(t)
	pods, pod := n.world.RemotePods, n.world.LocalPods[0]
	n.start(t, pods[0])
	for _, family := range families {
		n.serveUDP(t, 0, pods[0])
		before := n.translated(t, family)
		answer, err := pod.Ask(t.Context(), "tcp", vip(family), proxiertest.AskOptions{})
		if err != nil || answer.Server != pods[0].Name {
			t.Errorf("%v: answer %+v, error %v", family, answer, err)
		}
		flow, err := pod.Open(t.Context(), "udp", dnsVIP(family, 0), proxiertest.AskOptions{})
		netnstest.Check(t, err)
		_, err = flow.Ask(t.Context())
		netnstest.Check(t, err)
		n.serveUDP(t, 0, pods[1])
		poll.Until(t, "the socket ends", func() bool { return n.translated(t, family).Ended == before.Ended+1 })
		if after := n.translated(t, family); after.Translated != before.Translated+2 {
			t.Errorf("%v: %d sockets translated, want 2", family, after.Translated-before.Translated)
		}
		_ = flow.Close()
	}
	if c := n.engines[v1.IPv4Protocol].Abilities().Conditions(); len(c) > 0 {
		t.Errorf("conditions %+v", c)
	}
}
