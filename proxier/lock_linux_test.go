package proxier_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// owner is an engine that writes objects with the instance's Names.
type owner struct{ *proxiertest.RecordingEngine }

func (owner) Abilities() proxier.Abilities { return proxier.Abilities{OwnsNames: true} }

// owning returns a Proxier with such engines for a network namespace.
func owning(t *testing.T, netNS string, names proxier.Names, families ...v1.IPFamily) *proxier.Proxier {
	t.Helper()
	return owningAndLogging(t, nil, netNS, names, families...)
}

func owningAndLogging(t *testing.T, log *zap.Logger, netNS string, names proxier.Names, families ...v1.IPFamily) *proxier.Proxier {
	t.Helper()
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range families {
		engines[family] = owner{&proxiertest.RecordingEngine{}}
	}
	p, err := proxier.New(proxier.Config{
		NetNS: netNS, Names: names, Families: families,
		Runner: runner.Options{MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: 20 * time.Millisecond, Max: 20 * time.Millisecond}},
	}, proxier.Deps{Logger: log}, engines)
	if err != nil {
		t.Fatal(err)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return p
}

// TestHoldNames is not a test: holder runs it in another process.
func TestHoldNames(t *testing.T) {
	netNS := os.Getenv("HOLD_NAMES_IN")
	if netNS == "" {
		return // without Skip, which the test script reports as a failure
	}
	p := owning(t, netNS, proxier.KubeProxyNames(), v1.IPv4Protocol, v1.IPv6Protocol)
	go func() { _ = p.Run(context.Background()) }()
	poll.Until(t, "the first sync", func() bool { return p.Status().Synced })
	if err := os.WriteFile(os.Getenv("HOLD_NAMES_READY"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test process ends
}

// holder starts a process that programs a network namespace, and waits for its first sync.
func holder(t *testing.T, netNS string) *exec.Cmd {
	t.Helper()
	ready := filepath.Join(t.TempDir(), "ready")
	cmd := exec.Command(os.Args[0], "-test.run=^TestHoldNames$")
	cmd.Env = append(os.Environ(), "HOLD_NAMES_IN="+netNS, "HOLD_NAMES_READY="+ready)
	_, err := cmd.StdinPipe()
	netnstest.Check(t, errors.Join(err, cmd.Start()))
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	poll.Until(t, "the other process", func() bool { _, err := os.Stat(ready); return err == nil })
	return cmd
}

// TestTwoProcessesOfOneName: the second process writes nothing, names the first in its
// error and Status, and takes over when the first is killed. Instances with other names or
// in other network namespaces are not affected.
func TestTwoProcessesOfOneName(t *testing.T) {
	netNS := netnstest.New(t).Path()
	first := holder(t, netNS)
	other, err := proxier.NamesFor("other")
	netnstest.Check(t, err)
	ctx := t.Context()
	for name, p := range map[string]*proxier.Proxier{
		"other names":     owning(t, netNS, other, v1.IPv4Protocol, v1.IPv6Protocol),
		"other namespace": owning(t, netnstest.New(t).Path(), proxier.KubeProxyNames(), v1.IPv4Protocol, v1.IPv6Protocol),
	} {
		running(t, p)
		if err := p.Sync(ctx); err != nil {
			t.Errorf("%s: sync = %v, want nil", name, err)
		}
	}

	who := fmt.Sprintf("process %d (", first.Process.Pid)
	second := owning(t, netNS, proxier.KubeProxyNames(), v1.IPv4Protocol)
	if err := second.Cleanup(ctx); !errors.Is(err, proxier.ErrInUse) || !strings.Contains(err.Error(), who) {
		t.Errorf("Cleanup = %v, want ErrInUse and %q", err, who)
	}
	running(t, second)
	poll.Until(t, "failed sync", func() bool { return second.Status().Families[v1.IPv4Protocol].LastError != nil })
	status := second.Status()
	if err := status.Families[v1.IPv4Protocol].LastError; !errors.Is(err, proxier.ErrInUse) || !strings.Contains(err.Error(), who) || status.Synced {
		t.Errorf("sync = %v, synced %t, want ErrInUse and %q", err, status.Synced, who)
	}
	inUse := func() bool {
		return slices.ContainsFunc(second.Status().Conditions, func(c proxier.Condition) bool {
			return c.Type == proxier.ConditionInUse && c.Family == v1.IPv4Protocol && strings.Contains(c.Message, who)
		})
	}
	if !inUse() {
		t.Errorf("conditions %+v, want one that names %q", status.Conditions, who)
	}

	netnstest.Check(t, first.Process.Signal(syscall.SIGKILL))
	poll.Until(t, "takeover", func() bool { return second.Status().Synced && !inUse() })
	if err := owning(t, netNS, proxier.KubeProxyNames(), v1.IPv6Protocol).Cleanup(ctx); err != nil {
		t.Errorf("Cleanup of the other family = %v, want nil", err)
	}
	if err := owning(t, netNS, proxier.KubeProxyNames(), v1.IPv4Protocol).Cleanup(ctx); err != nil {
		t.Errorf("Cleanup by the same process = %v, want nil", err)
	}
}

// running runs a Proxier until end is called or the test ends.
func running(t *testing.T, p *proxier.Proxier) (end func()) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	end = sync.OnceFunc(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	t.Cleanup(end)
	return end
}

// TestNamesInUse: an instance that shares one name with a running instance of another
// process or of this one programs nothing until that has ended. Meanwhile it does not hold
// its other names. A process may clean up beside its own instances, as it does after a
// change of the mode.
func TestNamesInUse(t *testing.T) {
	base, both := proxier.KubeProxyNames(), []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	for where, first := range map[string]func(t *testing.T, netNS string) (who string, end func(), here bool){
		"another process": func(t *testing.T, netNS string) (string, func(), bool) {
			t.Helper()
			cmd := holder(t, netNS)
			return fmt.Sprintf("process %d (", cmd.Process.Pid), func() { netnstest.Check(t, cmd.Process.Signal(syscall.SIGKILL)) }, false
		},
		"this process": func(t *testing.T, netNS string) (string, func(), bool) {
			t.Helper()
			p := owning(t, netNS, base, both...)
			end := running(t, p)
			netnstest.Check(t, p.Sync(t.Context()))
			return "another Provider of this process", end, true
		},
	} {
		t.Run(where, func(t *testing.T) {
			netNS := netnstest.New(t).Path()
			who, end, here := first(t, netNS)
			waiting := map[*proxier.Proxier]func(){}
			for instance, c := range map[string]struct {
				share func(n *proxier.Names)
				what  string // is in use
			}{
				"none":   {func(*proxier.Names) {}, ""},
				"table":  {func(n *proxier.Names) { n.Table = base.Table }, "table kube-proxy"},
				"ipvs":   {func(n *proxier.Names) { n.Table = base.Table + ".ipvs" }, "table kube-proxy"},
				"chains": {func(n *proxier.Names) { n.ChainPrefix = base.ChainPrefix }, "chains KUBE"},
				"device": {func(n *proxier.Names) { n.Device = base.Device }, "device kube-ipvs0"},
				"all":    {func(n *proxier.Names) { *n = base }, "table kube-proxy"},
			} {
				names, err := proxier.NamesFor(instance)
				netnstest.Check(t, err)
				names.Instance = base.Instance // or it could not have these chains
				own := names
				c.share(&names)
				p := owning(t, netNS, names, both...)
				endOfIt := running(t, p)
				err = p.Sync(t.Context())
				if c.what == "" {
					if err != nil {
						t.Errorf("%s in common: sync = %v, want nil", instance, err)
					}
					continue
				}
				if part := c.what + " of IPv4 is programmed by " + who; !errors.Is(err, proxier.ErrInUse) || !strings.Contains(err.Error(), part) {
					t.Errorf("%s in common: sync = %v, want ErrInUse and %q", instance, err, part)
				}
				if err := owning(t, netNS, names, both...).Cleanup(t.Context()); here && err != nil || !here && (!errors.Is(err, proxier.ErrInUse) || !strings.Contains(err.Error(), who)) {
					t.Errorf("%s in common: Cleanup = %v, want ErrInUse only beside another process", instance, err)
				}
				bystander := owning(t, netNS, own, both...)
				endOfBystander := running(t, bystander)
				poll.Until(t, "sync of a bystander", func() bool { return bystander.Status().Synced })
				endOfBystander()
				waiting[p] = endOfIt
			}
			end()
			poll.Until(t, "takeover by all, one after the other", func() bool {
				for p, end := range waiting {
					if p.Status().Synced {
						end()
						delete(waiting, p)
					}
				}
				return len(waiting) == 0
			})
			for _, family := range both { // each may have a Provider of its own
				p := owning(t, netNS, base, family)
				running(t, p)
				if err := p.Sync(t.Context()); err != nil {
					t.Errorf("sync of %s alone = %v, want nil", family, err)
				}
			}
		})
	}
}

// TestTheHolderDrainsTheQueueOfItsLock: those who asked who holds the lock, and have gone, keep nobody
// from asking.
func TestTheHolderDrainsTheQueueOfItsLock(t *testing.T) {
	netNS := netnstest.New(t).Path()
	p := owningAndLogging(t, zap.NewNop(), netNS, proxier.KubeProxyNames(), v1.IPv4Protocol)
	running(t, p)
	ask := func() (err error) {
		netnstest.Check(t, namespace.Visit(netNS, func() error {
			var fd int
			if fd, err = syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0); err == nil {
				err = errors.Join(syscall.Connect(fd, &syscall.SockaddrUnix{Name: "@serviceplane/table/kube-proxy/IPv4"}), syscall.Close(fd))
			}
			return nil
		}))
		return err
	}
	netnstest.Check(t, p.Sync(t.Context()))
	var full error
	for full == nil {
		full = ask()
	}
	if !errors.Is(full, syscall.EAGAIN) {
		t.Fatalf("the queue has ended with %v, want %v", full, syscall.EAGAIN)
	}
	for full != nil {
		netnstest.Check(t, p.Sync(t.Context()))
		full = ask()
	}
}

// TestAUserWhoSquatsOnTheLockStopsNobody: an unprivileged user can listen on the address of
// the lock and fill its queue, but syncs go on.
func TestAUserWhoSquatsOnTheLockStopsNobody(t *testing.T) {
	for want, room := range map[string]int{"user 65534": 64, "does not accept connections": 0} {
		t.Run(want, func(t *testing.T) {
			netNS := netnstest.New(t).Path()
			netnstest.Check(t, namespace.Visit(netNS, func() error { return squat(t, room) }))
			core, logs := observer.New(zap.WarnLevel)
			p := owningAndLogging(t, zap.New(core), netNS, proxier.KubeProxyNames(), v1.IPv4Protocol)
			end := running(t, p)
			for range 2 {
				if err := p.Sync(t.Context()); err != nil {
					t.Errorf("sync = %v, want nil", err)
				}
			}
			end()
			if logs.Len() != 1 || !strings.Contains(fmt.Sprint(logs.All()[0].ContextMap()), want) {
				t.Errorf("log %v, want one line with %q", logs.All(), want)
			}
		})
	}
}

// squat listens on the address of a lock as another user, which this thread stays until it
// ends. If room is 0, it fills the queue.
func squat(t *testing.T, room int) error {
	t.Helper()
	const nobody = 65534
	if _, _, err := syscall.RawSyscall(syscall.SYS_SETRESUID, nobody, nobody, nobody); err != 0 {
		return err
	}
	address := &syscall.SockaddrUnix{Name: "@serviceplane/table/kube-proxy/IPv4"}
	open := func() (int, error) {
		fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
		t.Cleanup(func() { _ = syscall.Close(fd) })
		return fd, err
	}
	fd, err := open()
	if err != nil {
		return err
	}
	err = errors.Join(syscall.Bind(fd, address), syscall.Listen(fd, room))
	for err == nil && room == 0 {
		if fd, err = open(); err == nil {
			err = syscall.Connect(fd, address)
		}
	}
	if errors.Is(err, syscall.EAGAIN) {
		return nil
	}
	return err
}
