package nftables

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// TestAFailedSyncLosesNoEvent lets each netlink message of a Provider's sync fail. The next
// sync must program the events without getting them again, and the one after it must write
// nothing.
func TestAFailedSyncLosesNoEvent(t *testing.T) {
	t.Parallel()
	f := startFailing(t, newCluster(8, 5))
	failed := 0
	for {
		want := f.change(failed)
		f.failAt.Store(int64(failed + 1))
		err := f.Sync(t.Context())
		if f.failAt.Load() > 0 {
			break // all messages have had their turn
		}
		failed++
		f.failAt.Store(0)
		if err == nil {
			t.Fatalf("message %d failed and Sync did not notice", failed)
		}
		if f.Status().Families[v1.IPv4Protocol].PendingSince.IsZero() {
			t.Errorf("message %d failed and nothing is pending", failed)
		}
		f.sync(t)
		f.mustHold(t, want)
		before := f.writes.Load()
		f.sync(t)
		if n := f.writes.Load() - before; n != 0 {
			t.Errorf("after failure at message %d: an idle sync wrote %d objects", failed, n)
		}
	}
	t.Logf("%d messages failed in turn", failed)
	if failed < 5 {
		t.Errorf("only %d messages failed, want at least 5", failed)
	}
}

// failing is a Provider with a kernel that rejects messages on request.
type failing struct {
	*programmed
	failAt *atomic.Int64
}

func startFailing(t *testing.T, c *cluster) *failing {
	t.Helper()
	// Automatic retries would race with those of the test.
	limits := runner.Options{MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: time.Hour, Max: time.Hour}}
	p := startLimited(t, c, netnstest.New(t), limits)
	t.Cleanup(p.stop)
	f := &failing{programmed: p, failAt: p.engine.makeFaulty()}
	f.load(t)
	return f
}

// change makes events of several kinds, without the handlers, so that one sync gets them
// all: a Service scaled, one with a new endpoint, one deleted and one added. It returns the
// endpoints that each VIP must have.
func (f *failing) change(round int) map[string][]string {
	tracker, c := f.Tracker(), f.cluster
	scaled, moved, flipped := round%3, 3+round%2, 5+round%3
	c.slices[scaled] = newSlice(c.services[scaled].ObjectMeta, 1000*(round+1), 5+round%7)
	c.slices[moved] = replaced(c.slices[moved], round+1)
	for _, i := range []int{scaled, moved} {
		tracker.Endpoints.EndpointSliceUpdate(c.slices[i], false)
	}
	// This endpoint is replaced by one with another address.
	tracker.Services.Update(c.services[flipped], nil)
	renewed := c.services[flipped].DeepCopy()
	renewed.Spec.ClusterIP = netip.AddrFrom4([4]byte{10, 200, byte(round >> 8), byte(round)}).String()
	c.services[flipped] = renewed
	tracker.Services.Update(nil, renewed)

	want := map[string][]string{}
	for i := range c.services {
		want[c.services[i].Spec.ClusterIP] = addressesOf(c.slices[i])
	}
	return want
}

func addressesOf(slice *discovery.EndpointSlice) []string {
	var list []string
	for _, e := range slice.Endpoints {
		list = append(list, e.Addresses[0]+":"+strconv.Itoa(int(*slice.Ports[0].Port)))
	}
	slices.Sort(list)
	return list
}

// mustHold compares the endpoints of each VIP in the kernel.
func (f *failing) mustHold(t *testing.T, want map[string][]string) {
	t.Helper()
	o, err := f.engine.observe(t.Context())
	if err == nil {
		err = f.engine.observeElements(t.Context(), o)
	}
	if err != nil {
		t.Fatalf("observe: %v", err)
	}
	got := map[string][]string{}
	for key, data := range o.element[setEndpoints] {
		vip, _ := netip.AddrFromSlice([]byte(key[:4]))
		endpoint, _ := parseAddrPort(data)
		got[vip.String()] = append(got[vip.String()], endpoint.String())
	}
	for vip := range got {
		slices.Sort(got[vip])
		if !slices.Equal(got[vip], want[vip]) {
			t.Errorf("%s: endpoints %v, want %v", vip, got[vip], want[vip])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d VIPs, want %d", len(got), len(want))
	}
}

// TestAKernelWithoutNFTables expects an error that names the missing modules, and a cleanup
// without error.
func TestAKernelWithoutNFTables(t *testing.T) {
	t.Parallel()
	e, err := NewEngine(Config{}, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		t.Fatal(err)
	}
	e.open = func() (kernel, error) {
		return nil, nft.Unreachable(os.NewSyscallError("socket", unix.EPROTONOSUPPORT))
	}
	_, err = e.Apply(t.Context(), desired.Update{Family: v1.IPv4Protocol, Full: true})
	var lacks *proxier.UnsupportedError
	if !errors.As(err, &lacks) || !strings.Contains(lacks.Feature, "nf_tables") || !strings.Contains(lacks.Hint, "nfnetlink") {
		t.Errorf("Apply = %v, want an UnsupportedError about nf_tables that names the modules", err)
	}
	if err := e.Cleanup(t.Context()); err != nil {
		t.Errorf("Cleanup = %v, want nil", err)
	}
	e.open = func() (kernel, error) { return nil, nft.Unreachable(unix.EPERM) }
	if err := e.Cleanup(t.Context()); !errors.Is(err, proxier.ErrPermission) || errors.Is(err, proxier.ErrNotSupported) {
		t.Errorf("Cleanup without privileges = %v, want %v", err, proxier.ErrPermission)
	}
}
