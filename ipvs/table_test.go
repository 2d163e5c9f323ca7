package ipvs

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
)

// want is what the engine asks of a virtual server: nil reals mean that it is gone.
type want struct {
	scheduler string
	reals     map[netip.AddrPort]int
	serving   []netip.AddrPort
}

// history is a virtual server with two endpoints, and what befell it. It knows,
// independently of the table, what must be.
type history struct {
	key    serverKey
	kernel *fakeKernel
	table  *table
	now    time.Time
	want   want
	// dirty says that a call has failed: what is wanted is not there before the next
	// one.
	dirty bool
	// since is when an endpoint lost its right to connections, and latest is when it
	// must be gone. After a failure or a restart it may last longer.
	since, latest map[netip.AddrPort]time.Time
	broken        []string
}

const (
	testDrain = time.Minute
	// halfDrain is how time passes.
	halfDrain = testDrain / 2
)

func endpointA() netip.AddrPort { return netip.MustParseAddrPort("192.0.2.1:8080") }
func endpointB() netip.AddrPort { return netip.MustParseAddrPort("192.0.2.2:8080") }

func newHistory(protocol desired.Protocol) *history {
	h := &history{
		key: serverKey{protocol, netip.MustParseAddrPort("198.51.100.1:80")}, kernel: newFakeKernel(), now: time.Unix(1e9, 0),
		since: map[netip.AddrPort]time.Time{}, latest: map[netip.AddrPort]time.Time{},
	}
	h.kernel.hear = func(verb string, _ serverKey, real netip.AddrPort, _ int) {
		if verb == "delete real" {
			h.deleted(real)
		}
	}
	h.table = h.newTable()
	return h
}

func (h *history) newTable() *table {
	return newTable(h.kernel, testDrain, func() time.Time { return h.now })
}

func (h *history) breaks(format string, args ...any) {
	h.broken = append(h.broken, fmt.Sprintf(format, args...))
}

// entitled says whether an endpoint may have connections without end.
func (h *history) entitled(addr netip.AddrPort) bool {
	_, wanted := h.want.reals[addr]
	return wanted || h.want.reals != nil && slices.Contains(h.want.serving, addr)
}

// deleted is the first law: connections of TCP have their time.
func (h *history) deleted(addr netip.AddrPort) {
	if h.entitled(addr) {
		h.breaks("%v was deleted, want it kept: it is wanted, or serves", addr)
	}
	if h.key.protocol == desired.TCP && h.kernel.busy[h.key][addr] > 0 && h.now.Before(h.since[addr].Add(testDrain)) {
		h.breaks("%v was deleted with connections %v after it began to drain, want %v", addr, h.now.Sub(h.since[addr]), testDrain)
	}
}

// ask makes the table do what the engine would ask of it.
func (h *history) ask(w want) {
	before := map[netip.AddrPort]bool{endpointA(): h.entitled(endpointA()), endpointB(): h.entitled(endpointB())}
	h.want = w
	for addr, entitled := range before {
		if entitled && !h.entitled(addr) {
			h.since[addr] = h.now
		}
		if !h.entitled(addr) && (entitled || h.dirty) {
			h.latest[addr] = h.now.Add(testDrain)
		}
	}
	h.apply()
}

func (h *history) apply() {
	var err error
	if h.want.reals == nil {
		err = h.table.remove(h.key)
	} else {
		err = h.table.set(h.key, &virtual{settings: settings{scheduler: h.want.scheduler}, reals: h.want.reals, serving: h.want.serving})
	}
	h.ended(err)
	if err == nil {
		h.checkWanted()
	}
}

func (h *history) ended(err error) {
	if err != nil && !errors.Is(err, errFault) {
		h.breaks("unexpected error: %v", err)
	}
	h.dirty = err != nil
	if err == nil {
		h.checkAgreement()
	}
}

// checkWanted is the law of weights: exactly who is wanted takes new connections.
func (h *history) checkWanted() {
	v := h.kernel.virtuals[h.key]
	if h.want.reals != nil && (v == nil || v.scheduler != h.want.scheduler) {
		h.breaks("virtual server = %+v, want scheduler %s", v, h.want.scheduler)
		return
	}
	if v == nil {
		return
	}
	for addr, weight := range h.want.reals {
		if got, there := v.reals[addr]; !there || got != weight {
			h.breaks("%v has weight %d (there: %t), want %d", addr, got, there, weight)
		}
	}
	for addr, weight := range v.reals {
		if _, wanted := h.want.reals[addr]; !wanted && weight != 0 {
			h.breaks("%v has weight %d, want 0: nobody wants it", addr, weight)
		}
		if h.key.protocol == desired.UDP && !h.entitled(addr) {
			h.breaks("%v is there, want it gone: datagrams have nothing to finish", addr)
		}
	}
	if h.want.reals == nil && len(v.reals) == 0 {
		h.breaks("the virtual server is there without real servers, want it gone")
	}
}

// checkAgreement compares the table with the kernel.
func (h *history) checkAgreement() {
	v, e := h.kernel.virtuals[h.key], h.table.known[h.key]
	if v == nil || e == nil {
		if v != nil || e != nil {
			h.breaks("the table has %v, want what the kernel has: %v", e, v)
		}
		if len(h.table.servers) > 0 {
			h.breaks("the table counts virtual servers of %v, want none", h.table.servers)
		}
		return
	}
	got := map[netip.AddrPort]int{}
	for addr, r := range e.reals {
		got[addr] = r.weight
	}
	if !maps.Equal(got, v.reals) || e.settings != v.settings {
		h.breaks("the table has %v %v, want what the kernel has: %v %v", e.settings, got, v.settings, v.reals)
	}
	if n := h.table.servers[h.key.addr.Addr()]; n != 1 {
		h.breaks("the table counts %d virtual servers of the address, want 1", n)
	}
}

// tend lets the table look after what drains; then nothing may be left of what has
// no connections, or has had its time.
func (h *history) tend() {
	dirty := h.dirty
	err := h.table.tend()
	h.ended(err)
	if dirty { // what failed before is mended by asking again
		h.dirty = true
	}
	if h.dirty {
		return
	}
	v := h.kernel.virtuals[h.key]
	if v == nil {
		return
	}
	for addr := range v.reals {
		if !h.entitled(addr) && (h.kernel.busy[h.key][addr] == 0 || !h.now.Before(h.latest[addr])) {
			h.breaks("%v is left, want it deleted", addr)
		}
	}
	if h.want.reals == nil && len(v.reals) == 0 {
		h.breaks("the virtual server is left without real servers, want it gone")
	}
}

// relist makes a new table of what the kernel holds, as a full sync does.
func (h *history) relist(before *table) {
	h.table = h.newTable()
	if v := h.kernel.virtuals[h.key]; v != nil {
		h.table.adopt(h.key, &virtual{settings: v.settings, reals: maps.Clone(v.reals)})
		h.table.inherit(before, h.key)
	}
	if before == nil || h.dirty {
		for _, addr := range []netip.AddrPort{endpointA(), endpointB()} {
			h.latest[addr] = h.now.Add(testDrain)
		}
	}
	h.apply()
}

// state is all that decides what can happen next.
func (h *history) state() string {
	var b strings.Builder
	relative := func(t time.Time) int {
		if t.IsZero() {
			return -1
		}
		return int(max(0, t.Sub(h.now)) / halfDrain)
	}
	fmt.Fprint(&b, h.want, h.dirty, h.kernel.fault, h.kernel.busy[h.key], len(h.table.draining))
	if v := h.kernel.virtuals[h.key]; v != nil {
		fmt.Fprint(&b, v.settings, v.reals)
	}
	if e := h.table.known[h.key]; e != nil {
		fmt.Fprint(&b, e.settings, e.wanted)
		for _, addr := range slices.SortedFunc(maps.Keys(e.reals), netip.AddrPort.Compare) {
			fmt.Fprint(&b, addr, e.reals[addr].weight, relative(e.reals[addr].until))
		}
	}
	for _, addr := range []netip.AddrPort{endpointA(), endpointB()} {
		fmt.Fprint(&b, relative(h.since[addr].Add(testDrain)), relative(h.latest[addr]))
	}
	return b.String()
}

// step is something that may happen at any time.
type step struct {
	name string
	do   func(h *history)
}

func steps() []step {
	asks := func(scheduler string, reals map[netip.AddrPort]int, serving ...netip.AddrPort) func(*history) {
		return func(h *history) { h.ask(want{scheduler, reals, serving}) }
	}
	fails := func(f fault) func(*history) {
		return func(h *history) { h.kernel.fault = f }
	}
	a, b := endpointA(), endpointB()
	return []step{
		{"want A", asks("rr", map[netip.AddrPort]int{a: 1}, a)},
		{"want B by another scheduler", asks("wrr", map[netip.AddrPort]int{b: 3}, b)},
		{"want A and B", asks("rr", map[netip.AddrPort]int{a: 1, b: 1}, a, b)},
		{"want A, B terminates", asks("rr", map[netip.AddrPort]int{a: 1}, a, b)},
		{"want B, and A with weight 0", asks("rr", map[netip.AddrPort]int{a: 0, b: 1}, a, b)},
		{"want none", asks("", nil)},
		{"a client of A", func(h *history) {
			if h.kernel.busy[h.key][a] == 0 {
				h.kernel.connect(h.key, a)
			}
		}},
		{"A idle", func(h *history) { h.kernel.hangUp(h.key, a) }},
		{"half of Drain passes", func(h *history) { h.now = h.now.Add(halfDrain) }},
		{"tend", (*history).tend},
		{"restart", func(h *history) { h.relist(nil) }},
		{"full sync", func(h *history) { h.relist(h.table) }},
		{"the next call will fail", fails(fault{armed: true})},
		{"the call after the next will fail", fails(fault{armed: true, after: 1})},
		{"the next call's answer will be lost", fails(fault{armed: true, late: true})},
	}
}

// TestEveryHistoryOfAVirtualServerKeepsTheLaws visits every state that any sequence of
// steps can reach, each by a shortest one (PKT-80).
func TestEveryHistoryOfAVirtualServerKeepsTheLaws(t *testing.T) {
	t.Parallel()
	for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP, desired.SCTP} {
		t.Run(protocol.String(), func(t *testing.T) {
			t.Parallel()
			all := steps()
			seen := map[string]bool{}
			queue := [][]int{{}}
			for len(queue) > 0 {
				past := queue[0]
				queue = queue[1:]
				for i := range all {
					path := append(slices.Clone(past), i)
					h := newHistory(protocol)
					for _, j := range path {
						all[j].do(h)
					}
					if len(h.broken) > 0 {
						t.Fatalf("after %q:\n%s", names(all, path), strings.Join(h.broken, "\n"))
					}
					if s := h.state(); !seen[s] {
						seen[s] = true
						queue = append(queue, path)
					}
				}
			}
			t.Logf("%d states", len(seen))
			if len(seen) < 100 {
				t.Errorf("visited %d states, want more than 100", len(seen))
			}
		})
	}
}

func names(all []step, path []int) []string {
	list := make([]string, len(path))
	for i, j := range path {
		list[i] = all[j].name
	}
	return list
}
