package iptables

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Only the first packet of a connection passes the table nat, so the kernel's counter of a rule
// that translates is the number of connections to its endpoint: nothing is written to count.

// counterKey identifies a counter: that of the rules of a chain that translate to an endpoint.
// A chain never changes its service port, because its name is a hash of that.
type counterKey struct {
	chain    string
	endpoint netip.AddrPort
}

// counterValues are the packets that rules have translated.
type counterValues map[counterKey]uint64

// endedCounter is the last value of a counter whose rule was deleted.
type endedCounter struct {
	counterKey

	value uint64
}

// endings are the counters whose rules were deleted.
type endings struct {
	counters []endedCounter // in that order
	// flushed are chains whose counters have all ended, whether or not their last values are known.
	flushed map[string]bool
	// lost means that some are missing.
	lost bool
}

// totals turns counters into the numbers of service ports.
type totals struct {
	ledger *counting.Ledger[counterKey]
	owners map[string]changetracker.ServicePortName // of chains
	begun  bool
}

func newTotals(on bool) *totals {
	if !on {
		return nil
	}
	return &totals{ledger: counting.NewLedger[counterKey](), owners: map[string]changetracker.ServicePortName{}}
}

// own records the chains of a service port that an update sets.
func (t *totals) own(name changetracker.ServicePortName, p *portPlan) {
	if t == nil || p == nil {
		return
	}
	for chain := range p.chains {
		t.owners[chain] = name
	}
}

// ownerOf returns the zero Owner for chains of nobody.
func (t *totals) ownerOf(k counterKey) counting.Owner {
	name, ok := t.owners[k.chain]
	if !ok {
		return counting.Owner{}
	}
	return counting.Owner{Name: name, Endpoint: k.endpoint}
}

func (t *totals) add(k counterKey, value uint64) {
	t.ledger.Add(k, value, t.ownerOf(k), t.ledger.Clock())
}

// beginTally runs before the first write: what rules have counted before is nobody's.
func (e *engine) beginTally(ctx context.Context) error {
	t := e.totals
	if t == nil || t.begun {
		return nil
	}
	began := time.Now()
	values, err := e.guard.watcher.counters(ctx, t.ledger.Value)
	if err != nil {
		return fmt.Errorf("read counters of rules: %w", err)
	}
	t.begun = true
	t.ledger.Begin(began)
	for k, value := range values {
		t.ledger.Add(k, value, counting.Owner{}, t.ledger.Clock())
	}
	return nil
}

// addDeleted adds what deleted rules have counted.
func (e *engine) addDeleted() {
	t := e.totals
	if t == nil {
		return
	}
	ended := e.guard.watcher.ended()
	for _, c := range ended.counters {
		t.add(c.counterKey, c.value)
		t.ledger.Forget(c.counterKey)
	}
	if len(ended.flushed) > 0 {
		t.ledger.ForgetIf(func(k counterKey) bool { return ended.flushed[k.chain] })
	}
	if ended.lost {
		e.log.Warn("new connections of some deleted rules were not counted: the kernel had more notifications than fit the socket's buffer; raise net.core.rmem_max if this repeats")
	}
}

// applied is called after an update. A full one forgets the owners of chains that are gone.
func (t *totals) applied(update *desired.Update, m *model) {
	if t == nil {
		return
	}
	t.ledger.Applied(update)
	if !update.Full {
		return
	}
	maps.DeleteFunc(t.owners, func(chain string, name changetracker.ServicePortName) bool {
		p := m.ports[name]
		return p == nil || p.chains[chain] == nil
	})
}

// Counts is for proxier.Abilities: it reads the counters of the rules from the kernel. It waits
// for a sync, and a sync waits for it.
func (e *engine) Counts(ctx context.Context) (connection.Counts, error) {
	if e.totals == nil {
		return connection.Counts{}, counting.ErrOff
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.totals
	if e.guard.watcher == nil || e.model == nil {
		return t.ledger.Counts(), nil // nothing was written yet
	}
	values, err := e.guard.watcher.counters(ctx, t.ledger.Value)
	if err != nil {
		return connection.Counts{}, fmt.Errorf("read counters of rules: %w", err)
	}
	e.addDeleted()
	for k, value := range values {
		t.add(k, value)
	}
	return t.ledger.Counts(), nil
}

// Revisions of the target DNAT, and the offsets of the address and the port in their data: struct
// nf_nat_ipv4_multi_range_compat, and nf_nat_range and nf_nat_range2, which begin equally
// (linux/netfilter/nf_nat.h).
const (
	dnatTarget = "DNAT"

	dnatCompatRevision           = 0
	dnatCompatAddr, dnatAddr     = 8, 4
	dnatCompatPort, dnatPort     = 16, 36
	dnatCompatLength, dnatLength = 20, 40
)

// endpointOf returns where a target DNAT translates to.
func endpointOf(revision uint32, data []byte, v6 bool) (netip.AddrPort, bool) {
	addr, port, length := dnatAddr, dnatPort, dnatLength
	if revision == dnatCompatRevision {
		addr, port, length = dnatCompatAddr, dnatCompatPort, dnatCompatLength
	}
	if len(data) < length || v6 && revision == dnatCompatRevision {
		return netip.AddrPort{}, false
	}
	at := netip.AddrFrom4([4]byte(data[addr:][:4]))
	if v6 {
		at = netip.AddrFrom16([16]byte(data[addr:][:16]))
	}
	return netip.AddrPortFrom(at, binary.BigEndian.Uint16(data[port:])), true
}
