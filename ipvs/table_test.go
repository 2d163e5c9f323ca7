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
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/proxier"
)

// want is a virtual server that the engine needs; nil reals mean none.
type want struct {
	name     string
	settings settings
	reals    map[netip.AddrPort]int
	serving  []netip.AddrPort
}

// history is a virtual server with two endpoints, and the steps that led to its state. It
// derives the expected state independently of the table.
type history struct {
	past   []string
	key    serverKey
	kernel *fakeKernel
	table  *table
	now    time.Time
	want   want
	// dirty means that the wanted state is not programmed, because a call has failed.
	dirty bool
	// since is when an endpoint began to drain, and latest is when it must be deleted, which
	// is later after a failure or a restart.
	since, latest map[netip.AddrPort]time.Time
	broken        []string
}

const (
	testDrain = time.Minute
	// halfDrain is the step in which time passes.
	halfDrain = testDrain / 2
)

func endpointA() netip.AddrPort { return netip.MustParseAddrPort("192.0.2.1:8080") }
func endpointB() netip.AddrPort { return netip.MustParseAddrPort("192.0.2.2:8080") }

func newHistory(protocol desired.Protocol) *history {
	h := &history{
		key: keyOf(protocol, netip.MustParseAddrPort("198.51.100.1:80")), kernel: newFakeKernel(), now: time.Unix(1e9, 0),
		since: map[netip.AddrPort]time.Time{}, latest: map[netip.AddrPort]time.Time{},
	}
	h.table = h.newTable()
	h.listen()
	return h
}

func (h *history) listen() {
	h.kernel.onWrite = func(verb string, _ serverKey, real netip.AddrPort, _ int) {
		if verb == "delete real" {
			h.deleted(real)
		}
	}
}

// fork copies a history.
func (h *history) fork() *history {
	f := *h
	f.since, f.latest = maps.Clone(h.since), maps.Clone(h.latest)
	kernel := *h.kernel
	f.kernel = &kernel
	kernel.virtuals, kernel.busy = map[serverKey]*virtual{}, map[serverKey]map[netip.AddrPort]int{}
	for key, v := range h.kernel.virtuals {
		kernel.virtuals[key] = &virtual{settings: v.settings, reals: maps.Clone(v.reals)}
		kernel.busy[key] = maps.Clone(h.kernel.busy[key])
	}
	f.listen()
	f.table = f.newTable()
	f.table.draining, f.table.perAddr = maps.Clone(h.table.draining), maps.Clone(h.table.perAddr)
	for key, e := range h.table.virtuals {
		copied := &virtualServer{settings: e.settings, wanted: e.wanted, reals: map[netip.AddrPort]*realServer{}}
		for addr, r := range e.reals {
			server := *r
			copied.reals[addr] = &server
		}
		f.table.virtuals[key] = copied
	}
	return &f
}

func (h *history) newTable() *table {
	return newTable(h.kernel, testDrain, func() time.Time { return h.now })
}

func (h *history) breaks(format string, args ...any) {
	h.broken = append(h.broken, fmt.Sprintf(format, args...))
}

// entitled reports whether connections to an endpoint may continue without limit.
func (h *history) entitled(addr netip.AddrPort) bool {
	_, wanted := h.want.reals[addr]
	return wanted || h.want.reals != nil && slices.Contains(h.want.serving, addr)
}

func (h *history) takesNew(addr netip.AddrPort) bool {
	v := h.kernel.virtuals[h.key]
	return v != nil && v.reals[addr] > 0
}

// deleted checks the first law: TCP connections continue until the deadline.
func (h *history) deleted(addr netip.AddrPort) {
	if h.entitled(addr) {
		h.breaks("%v was deleted, want it kept: it is wanted, or serves", addr)
	}
	if h.key.Protocol == desired.TCP && h.kernel.busy[h.key][addr] > 0 && h.now.Before(h.since[addr].Add(testDrain)) {
		h.breaks("%v was deleted with connections %v after it began to drain, want %v", addr, h.now.Sub(h.since[addr]), testDrain)
	}
}

// ask calls the table as the engine would.
func (h *history) ask(w want) {
	before := map[netip.AddrPort]bool{endpointA(): h.entitled(endpointA()), endpointB(): h.entitled(endpointB())}
	h.want = w
	for addr, entitled := range before {
		if entitled && !h.entitled(addr) && (!h.dirty || h.takesNew(addr)) {
			h.since[addr] = h.now
		}
		if !h.entitled(addr) && (entitled || h.dirty) {
			h.latest[addr] = h.now.Add(testDrain)
		}
	}
	h.apply()
}

func (h *history) apply() {
	if h.dirty && h.kernel.lost { // the engine reads the unknown state
		h.relist(h.table)
		return
	}
	h.program()
}

func (h *history) program() {
	var err error
	if h.want.reals == nil {
		err = h.table.remove(h.key)
	} else {
		err = h.table.set(h.key, &virtual{settings: h.want.settings, instead: plain(), reals: h.want.reals, serving: desired.EndpointsOf(h.want.serving...)})
	}
	if isMissing(err) {
		if h.kernel.missing[h.want.settings.scheduler] == nil {
			h.breaks("%v, though the kernel has the scheduler", err)
		}
		err = nil // the engine reports it, and trusts the table
	}
	h.dirty = err != nil
	if err == nil {
		h.checkWanted()
	}
	h.ended(err)
}

// plain are the settings for a kernel without the wanted scheduler.
func plain() settings { return settings{scheduler: "rr"} }

// isMissing reports whether an error is only that the kernel lacks a scheduler.
func isMissing(err error) bool {
	return errors.Is(err, proxier.ErrNotSupported) && !errors.Is(err, errFault) && !errors.Is(err, errGone)
}

// ended checks the result of a call.
func (h *history) ended(err error) {
	if err != nil && !errors.Is(err, errFault) && (!h.kernel.lost || !errors.Is(err, errGone)) {
		h.breaks("unexpected error: %v", err)
	}
	if err == nil && !h.kernel.lost {
		h.checkAgreement()
	}
}

// checkWanted checks the law of weights: exactly the wanted endpoints get new connections.
func (h *history) checkWanted() {
	v := h.kernel.virtuals[h.key]
	if len(h.want.reals) > 0 && v == nil {
		h.breaks("there is no virtual server, want it with %+v", h.want.settings)
	}
	if v == nil {
		return
	}
	expected := h.want.settings
	if h.kernel.missing[expected.scheduler] != nil && v.settings != expected {
		expected = plain()
	}
	if h.want.reals != nil && !v.satisfy(expected) {
		h.breaks("virtual server has %+v, want %+v", v.settings, expected)
	}
	for addr, weight := range h.want.reals {
		if got, there := v.reals[addr]; !there || got != weight {
			h.breaks("%v has weight %d (there: %t), want %d", addr, got, there, weight)
		}
	}
	for addr, weight := range v.reals {
		if _, wanted := h.want.reals[addr]; !wanted && weight != 0 {
			h.breaks("%v has weight %d, want 0: it is not wanted", addr, weight)
		}
		if h.key.Protocol == desired.UDP && !h.entitled(addr) {
			h.breaks("%v is there, want it gone: UDP does not drain", addr)
		}
	}
	if len(h.want.reals) == 0 && len(v.reals) == 0 {
		h.breaks("the virtual server is there without real servers, want it gone")
	}
}

// checkAgreement compares the table with the kernel.
func (h *history) checkAgreement() {
	v, e := h.kernel.virtuals[h.key], h.table.virtuals[h.key]
	if v == nil || e == nil {
		if v != nil || e != nil {
			h.breaks("the table has %v, want what the kernel has: %v", e, v)
		}
		if len(h.table.perAddr) > 0 {
			h.breaks("the table counts virtual servers of %v, want none", h.table.perAddr)
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
	if n := h.table.perAddr[h.key.VIP]; n != 1 {
		h.breaks("the table counts %d virtual servers of the address, want 1", n)
	}
}

// tend deletes drained real servers. Then none may be left without connections, or after its
// deadline.
func (h *history) tend() {
	if h.dirty { // the engine programs again before it deletes
		return
	}
	err := h.table.deleteDrained()
	if len(h.table.draining) == 0 {
		h.kernel.lost = false
	}
	if h.ended(err); err != nil {
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
	if len(h.want.reals) == 0 && len(v.reals) == 0 {
		h.breaks("the virtual server is left without real servers, want it gone")
	}
}

// relist creates a new table from the state of the kernel, as a full sync does.
func (h *history) relist(before *table) {
	h.table, h.kernel.lost = h.newTable(), false
	if v := h.kernel.virtuals[h.key]; v != nil {
		h.table.adopt(h.key, &virtual{settings: v.settings, reals: maps.Clone(v.reals)})
		h.table.inheritDeadlines(before, h.key)
	}
	if before == nil || h.dirty {
		for _, addr := range []netip.AddrPort{endpointA(), endpointB()} {
			h.latest[addr] = h.now.Add(testDrain)
		}
	}
	h.program()
}

// state is all that determines the next steps.
type state struct {
	want        string
	dirty, lost bool
	fault       fault
	draining    int
	there       [2]bool // in the kernel, in the table
	wanted      bool
	settings    [2]settings
	endpoints   [2]endpointState
}

type endpointState struct {
	weights                 [2]int // in the kernel, in the table; -1 if it is not there
	busy                    int
	deadline, since, latest int
}

func (h *history) state() state {
	s := state{want: h.want.name, dirty: h.dirty, lost: h.kernel.lost, fault: h.kernel.fault, draining: len(h.table.draining)}
	v, e := h.kernel.virtuals[h.key], h.table.virtuals[h.key]
	if v == nil {
		v = &virtual{}
	} else {
		s.there[0], s.settings[0] = true, v.settings
	}
	if e == nil {
		e = &virtualServer{}
	} else {
		s.there[1], s.settings[1], s.wanted = true, e.settings, e.wanted
	}
	for i, addr := range []netip.AddrPort{endpointA(), endpointB()} {
		p := &s.endpoints[i]
		p.weights, p.busy = [2]int{-1, -1}, h.kernel.busy[h.key][addr]
		if weight, there := v.reals[addr]; there {
			p.weights[0] = weight
		}
		if r := e.reals[addr]; r != nil {
			p.weights[1], p.deadline = r.weight, h.ahead(r.deadline)
		}
		if p.busy > 0 {
			p.since = h.ahead(h.since[addr].Add(testDrain))
		}
		p.latest = h.ahead(h.latest[addr])
	}
	return s
}

// ahead returns how far a time is in the future, in steps; -1 for the zero time.
func (h *history) ahead(t time.Time) int {
	if t.IsZero() {
		return -1
	}
	return int(max(0, t.Sub(h.now)) / halfDrain)
}

// step is an event that may happen at any time.
type step struct {
	name string
	do   func(h *history)
}

func steps() []step {
	asks := func(name, scheduler string, reals map[netip.AddrPort]int, serving ...netip.AddrPort) step {
		return step{name, func(h *history) { h.ask(want{name, settings{scheduler: scheduler}, reals, serving}) }}
	}
	fails := func(f fault) func(*history) {
		return func(h *history) { h.kernel.fault = f }
	}
	a, b := endpointA(), endpointB()
	return []step{
		asks("want A", "rr", map[netip.AddrPort]int{a: 1}, a),
		asks("want B by another scheduler", "wrr", map[netip.AddrPort]int{b: 3}, b),
		asks("want A and B", "rr", map[netip.AddrPort]int{a: 1, b: 1}, a, b),
		asks("want A, B terminates", "rr", map[netip.AddrPort]int{a: 1}, a, b),
		asks("want B, and A with weight 0", "rr", map[netip.AddrPort]int{a: 0, b: 1}, a, b),
		asks("want no endpoint, A serves", "rr", map[netip.AddrPort]int{}, a),
		asks("want none", "", nil),
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

// hashSteps change the policy.
func hashSteps() []step {
	a, b := endpointA(), endpointB()
	hashes := func(name string, missing map[string]error) step {
		return step{name, func(h *history) {
			h.kernel.missing = missing
			h.ask(want{name, settings{scheduler: schedulerMaglev, flags: flagHashFallback}, map[netip.AddrPort]int{a: 1, b: 2}, []netip.AddrPort{a, b}})
		}}
	}
	return []step{
		hashes("want A and B by a hash, with weights", nil),
		hashes("want A and B by a hash that the kernel lacks", map[string]error{schedulerMaglev: &proxier.UnsupportedError{Feature: "mh"}}),
	}
}

// longestHistory is enough to reach each transition of a real server, with faults
// before and after it.
const longestHistory = 8

// TestEveryHistoryOfAVirtualServerKeepsTheLaws tries all sequences of steps, without those whose state another
// sequence has reached before (PKT-80).
func TestEveryHistoryOfAVirtualServerKeepsTheLaws(t *testing.T) {
	t.Parallel()
	for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
		t.Run(protocol.String(), func(t *testing.T) {
			t.Parallel()
			all := steps()
			if protocol == desired.TCP { // UDP differs in draining only
				all = append(all, hashSteps()...)
			}
			seen := map[state]bool{}
			latest := []*history{newHistory(protocol)}
			for range chance.Few(longestHistory-2, longestHistory) {
				var next []*history
				for _, h := range latest {
					for i := range all {
						f := h.after(t, &all[i])
						if s := f.state(); !seen[s] {
							seen[s] = true
							next = append(next, f)
						}
					}
				}
				latest = next
			}
			t.Logf("%d states", len(seen))
			if len(seen) < 1000 {
				t.Errorf("reached %d states, want more than 1000", len(seen))
			}
		})
	}
}

// after returns the history after one more step.
func (h *history) after(t *testing.T, s *step) *history {
	t.Helper()
	f := h.fork()
	f.past = append(slices.Clone(h.past), s.name)
	s.do(f)
	if len(f.broken) > 0 {
		t.Fatalf("after %q:\n%s", f.past, strings.Join(f.broken, "\n"))
	}
	return f
}

// A new forwarding method reaches each real server, also draining ones, with their weights.
func TestANewForwardingMethodReachesEachRealServer(t *testing.T) {
	t.Parallel()
	k := newFakeKernel()
	table, key := newTable(k, testDrain, time.Now), tcpKey("198.51.100.1:80")
	set := func(how ForwardingMethod, reals map[netip.AddrPort]int) {
		t.Helper()
		want := &virtual{settings: settings{scheduler: "rr", forward: how}, reals: reals, serving: desired.EndpointsOf(endpointA(), endpointB())}
		if err := table.set(key, want); err != nil {
			t.Fatal(err)
		}
	}
	set(ForwardMasquerade, map[netip.AddrPort]int{endpointA(): 1, endpointB(): 1})
	set(ForwardMasquerade, map[netip.AddrPort]int{endpointA(): 1})
	var written []string
	k.onWrite = func(verb string, _ serverKey, real netip.AddrPort, weight int) {
		if verb == "put real" {
			written = append(written, fmt.Sprintf("%v %d", real, weight))
		}
	}
	set(ForwardTunnel, map[netip.AddrPort]int{endpointA(): 1})
	if want := []string{endpointA().String() + " 1", endpointB().String() + " 0"}; !slices.Equal(written, want) || k.virtuals[key].forward != ForwardTunnel {
		t.Errorf("written %q with method %v, want %q with %v", written, k.virtuals[key].forward, want, ForwardTunnel)
	}
	if written = nil; table.set(key, &virtual{
		settings: settings{scheduler: "rr", forward: ForwardTunnel}, reals: map[netip.AddrPort]int{endpointA(): 1}, serving: desired.EndpointsOf(endpointB()),
	}) != nil || written != nil {
		t.Errorf("the same again writes %q, want nothing", written)
	}
}

// A virtual server without real servers is not created, not even temporarily.
func TestAVirtualServerWithoutRealServersIsNotCreated(t *testing.T) {
	t.Parallel()
	k := newFakeKernel()
	table := newTable(k, testDrain, time.Now)
	err := table.set(tcpKey("198.51.100.1:80"), &virtual{serving: desired.EndpointsOf(endpointA())})
	if err != nil || k.calls != 0 || table.writes != 0 {
		t.Errorf("set = %v with %d calls and %d writes, want none", err, k.calls, table.writes)
	}
}
