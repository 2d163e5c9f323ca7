package conntrack

import (
	"context"
	"errors"
	"maps"
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

// fakeTable is a kernel in which every provoked client gets a RST, and sends one the next time, except those in deaf.
// Clients in silent send none. Those in gone have no conntrack entry, those in back have opened a new connection since.
type fakeTable struct {
	mu                       sync.Mutex // guards all below
	err                      error
	flushed                  bool                      // the next reading fails
	listed                   map[netip.AddrPort]uint64 // RSTs by client
	deaf, silent, gone, back map[netip.AddrPort]bool
	provoked                 int
	most, removals           int
}

func newFakeTable() *fakeTable {
	return &fakeTable{
		listed: map[netip.AddrPort]uint64{}, deaf: map[netip.AddrPort]bool{}, silent: map[netip.AddrPort]bool{},
		gone: map[netip.AddrPort]bool{}, back: map[netip.AddrPort]bool{},
	}
}

func (k *fakeTable) remove() (left bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err == nil && len(k.listed) == 0 {
		k.removals++
	}
	return len(k.listed) > 0, k.err
}

func (k *fakeTable) list(conns []*resettingConn) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err != nil {
		return k.err
	}
	for _, c := range conns {
		k.listed[c.client] = 0
	}
	k.most = max(k.most, len(k.listed))
	return nil
}

func (k *fakeTable) cut(conns []*resettingConn) (ended []*resettingConn, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range conns {
		if c.cut = !k.gone[c.client]; !c.cut {
			ended = append(ended, c)
		}
	}
	return ended, k.err
}

func (k *fakeTable) provoke(conns []*resettingConn) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.provoked += len(conns)
	for _, c := range conns {
		switch resets, ok := k.listed[c.client]; {
		case !ok || !c.cut || k.deaf[c.client]:
		case resets == 0:
			k.listed[c.client]++
		case !k.silent[c.client]:
			delete(k.listed, c.client)
		}
	}
	return k.err
}

func (k *fakeTable) waiting() (func(*resettingConn) (uint64, bool), error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.flushed {
		k.flushed = false
		return nil, errors.New("no table")
	}
	now := maps.Clone(k.listed)
	return func(c *resettingConn) (uint64, bool) {
		resets, ok := now[c.client]
		return resets, ok && !k.back[c.client]
	}, k.err
}

func (k *fakeTable) forget(conns []*resettingConn) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range conns {
		delete(k.listed, c.client)
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

func client(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(n))
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
			for range 2 { // found twice
				e.add(&resettingConn{handle: netlinkx.Handle{ReplyTo: client(i)}, client: client(i)})
			}
		}
		e.begin()
		test(t, e, k, logged)
		stop()
		if err := <-ended; err != nil {
			t.Errorf("run = %v, want nil", err)
		}
		if open, _, _ := e.status(); k.counts().listed != open {
			t.Errorf("%d connections are listed after the end, want the %d that are open", k.counts().listed, open)
		}
	})
}

// TestConnectionsEndWithinBounds: CT-12.
func TestConnectionsEndWithinBounds(t *testing.T) {
	const n = 3 * maxResetting
	deaf := func(k *fakeTable) {
		for i := range n {
			k.deaf[client(i)], k.silent[client(i)] = i%2 == 0, i%3 == 0
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

// Every connection has an attempt before any has a second one.
func TestTheFirstAttemptComesFirst(t *testing.T) {
	const rounds = 4
	testEnder(t, rounds*roundSize, func(*fakeTable) {}, func(t *testing.T, _ *ender, k *fakeTable, _ *observer.ObservedLogs) {
		time.Sleep(rounds*roundPause + roundPause/2)
		synctest.Wait()
		k.mu.Lock()
		defer k.mu.Unlock()
		if len(k.listed) != rounds*roundSize {
			t.Errorf("%d connections are listed, want all %d", len(k.listed), rounds*roundSize)
		}
		for addr, resets := range k.listed {
			if resets != 1 {
				t.Fatalf("%v has got %d RSTs, want one", addr, resets)
			}
		}
	})
}

// Connections that have ended are forgotten, and no packet is sent for them; nor is one for a new
// connection of a client.
func TestConnectionsThatEndThemselvesAreForgotten(t *testing.T) {
	for name, most := range map[string]int{"gone": 0, "back": 1} {
		t.Run(name, func(t *testing.T) {
			prepare := func(k *fakeTable) {
				k.deaf[client(0)] = true
				map[string]map[netip.AddrPort]bool{"gone": k.gone, "back": k.back}[name][client(0)] = true
			}
			testEnder(t, 1, prepare, func(t *testing.T, e *ender, k *fakeTable, _ *observer.ObservedLogs) {
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if s := numbersOf(e); s != [2]int{} || k.counts().provoked != most || k.counts().removals != 1 {
					t.Errorf("status %+v, %d packets, %d removals; want nothing, %d packets, and no table", s, k.counts().provoked, k.counts().removals, most)
				}
			})
		})
	}
}

// What an ender leaves stays for the next one, until it has expired.
func TestWhatAnEarlierProcessHasLeftStays(t *testing.T) {
	testEnder(t, 0, func(k *fakeTable) { k.listed[client(9)] = 0 }, func(t *testing.T, e *ender, k *fakeTable, _ *observer.ObservedLogs) {
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if got := k.counts(); got.listed != 1 || got.removals != 0 {
			t.Errorf("%+v, want the connection in the table", got)
		}
		k.mu.Lock()
		clear(k.listed)
		k.mu.Unlock()
		time.Sleep(2 * longestWait)
		synctest.Wait()
		if got := k.counts(); got.removals != 1 {
			t.Errorf("%d removals once it has expired, want one", got.removals)
		}
	})
}

// A RST that the table has counted before a connection was listed is not a RST of this connection.
func TestAnEarlierRSTEndsNoConnection(t *testing.T) {
	prepare := func(k *fakeTable) {
		k.listed[client(0)] = 1 // an earlier process has left this
		k.deaf[client(0)], k.deaf[client(1)] = true, true
	}
	testEnder(t, 0, prepare, func(t *testing.T, e *ender, k *fakeTable, _ *observer.ObservedLogs) {
		for _, n := range []int{1, 0} { // the first one has the table read
			e.add(&resettingConn{handle: netlinkx.Handle{ReplyTo: client(n)}, client: client(n)})
			e.begin()
			time.Sleep(2 * longestWait)
			synctest.Wait()
		}
		if s := numbersOf(e); s != [2]int{2, 0} {
			t.Errorf("status %+v, want both connections open", s)
		}
	})
}

// If another program deletes the table, the next rounds list all connections again, not only those whose next
// attempt is due.
func TestATableThatIsGoneComesBackWithAllConnections(t *testing.T) {
	deaf := func(k *fakeTable) { k.deaf[client(0)], k.deaf[client(1)] = true, true }
	testEnder(t, 0, deaf, func(t *testing.T, e *ender, k *fakeTable, _ *observer.ObservedLogs) {
		for n := range 2 {
			e.add(&resettingConn{handle: netlinkx.Handle{ReplyTo: client(n)}, client: client(n)})
			e.begin()
			time.Sleep(5*time.Minute + longestWait/2)
		}
		k.mu.Lock()
		clear(k.listed)
		k.flushed = true
		k.mu.Unlock()
		for flushed := true; flushed; {
			time.Sleep(time.Second)
			synctest.Wait()
			k.mu.Lock()
			flushed = k.flushed
			k.mu.Unlock()
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := k.counts(); got.listed != 2 {
			t.Errorf("%d connections are listed, want both", got.listed)
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
