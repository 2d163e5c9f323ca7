package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// fakeTable is a kernel in which every provoked client gets a RST, except those in deaf.
type fakeTable struct {
	mu               sync.Mutex // guards all below
	err              error
	listed           map[[4]byte]bool
	deaf, gone, done map[[4]byte]bool
	provoked         int
	most, removals   int
}

func newFakeTable() *fakeTable {
	return &fakeTable{listed: map[[4]byte]bool{}, deaf: map[[4]byte]bool{}, gone: map[[4]byte]bool{}, done: map[[4]byte]bool{}}
}

func (k *fakeTable) remove() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err == nil {
		k.removals++
		clear(k.listed)
	}
	return k.err
}

func (k *fakeTable) list(conns []*resettingConn) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		return k.err
	}
	for _, c := range conns {
		k.listed[c.handle.ID] = true
	}
	k.most = max(k.most, len(k.listed))
	return nil
}

func (k *fakeTable) reset() (map[[4]byte]bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	reset := map[[4]byte]bool{}
	for id := range k.done {
		reset[id] = k.listed[id]
	}
	return reset, k.err
}

func (k *fakeTable) existing(conns []*resettingConn) ([]*resettingConn, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(conns), func(c *resettingConn) bool { return k.gone[c.handle.ID] }), k.err
}

func (k *fakeTable) provoke(conns []*resettingConn) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.provoked += len(conns)
	for _, c := range conns {
		if !k.deaf[c.handle.ID] && k.listed[c.handle.ID] {
			k.done[c.handle.ID] = true
		}
	}
	return k.err
}

func (k *fakeTable) forget(conns []*resettingConn, _ bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range conns {
		delete(k.listed, c.handle.ID)
	}
	return k.err
}

// counts is what a fakeTable has counted.
type counts struct{ listed, provoked, most, removals int }

func (k *fakeTable) counts() counts {
	k.mu.Lock()
	defer k.mu.Unlock()
	return counts{len(k.listed), k.provoked, k.most, k.removals}
}

func number4(n int) (id [4]byte) {
	binary.BigEndian.PutUint32(id[:], uint32(n))
	return id
}

// testEnder runs an ender in a synctest bubble, with n connections.
func testEnder(t *testing.T, n int, prepare func(k *fakeTable), test func(t *testing.T, e *ender, k *fakeTable, logged *observer.ObservedLogs)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		k := newFakeTable()
		prepare(k)
		core, logged := observer.New(zapcore.DebugLevel)
		e := newEnder(k)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- e.run(ctx, zap.New(core)) }()
		synctest.Wait() // orders the ender before us
		if k.counts().removals != 0 {
			t.Error("removed a table before the first Clean, which may be that of another instance")
		}
		for i := range n {
			server := netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(i))
			for range 2 { // found twice
				e.add(&resettingConn{handle: netlinkx.Handle{ID: number4(i)}, server: server})
			}
		}
		e.begin()
		test(t, e, k, logged)
		stop()
		if err := <-ended; err != nil {
			t.Errorf("run = %v, want nil", err)
		}
		if k.counts().listed > 0 {
			t.Errorf("%d connections are listed after the end, want no table", k.counts().listed)
		}
	})
}

// TestConnectionsEndWithinBounds: CT-12.
func TestConnectionsEndWithinBounds(t *testing.T) {
	const n = 3 * maxResetting
	deaf := func(k *fakeTable) {
		for i := range n {
			k.deaf[number4(i)] = i%2 == 0
		}
	}
	testEnder(t, n, deaf, func(t *testing.T, e *ender, k *fakeTable, _ *observer.ObservedLogs) {
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if limit := roundSize * int(11*time.Second/roundPause); k.counts().provoked > limit {
			t.Errorf("%d packets in 10 s, want %d at most", k.counts().provoked, limit)
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if k.counts().most > maxResetting {
			t.Errorf("%d connections at a time, want %d at most", k.counts().most, maxResetting)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if s := numbersOf(e); s != [2]int{0, n / 2} {
			t.Errorf("status %+v, want %d ended, and none open", s, n/2)
		}
		if k.counts().listed > 0 || k.counts().removals != 1 {
			t.Errorf("%d are listed after %d removals, want no table after one", k.counts().listed, k.counts().removals)
		}
	})
}

// Connections that end themselves are forgotten, and no packet is sent for them.
func TestConnectionsThatEndThemselvesAreForgotten(t *testing.T) {
	testEnder(t, 1, func(k *fakeTable) { k.gone[number4(0)] = true }, func(t *testing.T, e *ender, k *fakeTable, _ *observer.ObservedLogs) {
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if s := numbersOf(e); s != [2]int{} || k.counts().provoked != 0 {
			t.Errorf("status %+v, %d packets, want nothing", s, k.counts().provoked)
		}
	})
}

// TestAFailureToEndIsRetried: CT-12. One line of log, and a condition while it lasts.
func TestAFailureToEndIsRetried(t *testing.T) {
	testEnder(t, 1, func(k *fakeTable) { k.err = errors.New("no nf_tables") }, func(t *testing.T, e *ender, k *fakeTable, logged *observer.ObservedLogs) {
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		open, _, condition := e.status()
		if open != 1 || condition.Type != proxier.ConditionConnections || condition.Message != "no nf_tables" || logged.Len() != 1 {
			t.Errorf("%d open, condition %+v, %d lines; want one of each", open, condition, logged.Len())
		}
		k.mu.Lock()
		k.err = nil
		k.mu.Unlock()
		time.Sleep(2 * longestWait)
		synctest.Wait()
		if open, ended, condition := e.status(); open != 0 || ended != 1 || condition.Type != "" {
			t.Errorf("status %+v, condition %+v afterwards, want one ended", [2]int{open, ended}, condition)
		}
	})
}

// A segment has the checksum that a receiver computes.
func TestSegmentsHaveAValidChecksum(t *testing.T) {
	for _, addrs := range [][2]string{{"10.0.0.1:80", "10.0.0.2:81"}, {"[fd00::1]:80", "[fd00::2]:81"}} {
		from, to := netip.MustParseAddrPort(addrs[0]), netip.MustParseAddrPort(addrs[1])
		p := segment(from, to, flagSYN)
		tcp := p[len(p)-tcpHeaderLen:]
		sum := slices.Concat(from.Addr().AsSlice(), to.Addr().AsSlice(), []byte{0, tcpHeaderLen, 0, unix.IPPROTO_TCP}, tcp)
		if got := checksum(sum); got != 0 {
			t.Errorf("checksum of %v = %#x, want 0", addrs, got)
		}
	}
}

// numbersOf are how many connections must end, and how many have.
func numbersOf(e *ender) [2]int {
	open, ended, _ := e.status()
	return [2]int{open, ended}
}
