package ipvs

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/counting"
)

// counterKey identifies a counter: that of a real server.
type counterKey struct {
	server serverKey
	real   netip.AddrPort
}

// totals turns the kernel's counters of real servers into the numbers of service ports. It is
// guarded by engine.mu.
type totals struct {
	ledger *counting.Ledger[counterKey]
	// owners and servers are those of Engine and its table.
	owners  map[serverKey]changetracker.ServicePortName
	servers map[serverKey]*virtualServer
	// departed are the real servers that were deleted, and when. While connections refer to one,
	// the kernel keeps it: added again, it continues to count from where it was.
	departed map[serverKey]map[netip.AddrPort]time.Time
}

func newTotals(on bool) *totals {
	if !on {
		return nil
	}
	return &totals{ledger: counting.NewLedger[counterKey](), departed: map[serverKey]map[netip.AddrPort]time.Time{}}
}

// memory is how long deleted real servers are remembered. The kernel needs them until their last
// connection has ended.
const memory = 24 * time.Hour

// statsDelay is more than the age of a counter: the kernel sums up those of its processors every two
// seconds (net/netfilter/ipvs/ip_vs_est.c). A real server that drains stays for so long, so that
// nothing is lost. Those of UDP cannot stay.
const statsDelay = 3 * time.Second

// add adds the counters of the real servers of a virtual server.
func (t *totals) add(server serverKey, of loads, began uint64) {
	for real, load := range of {
		k := counterKey{server, real}
		t.ledger.Add(k, widen(t.ledger.Value(k), load.total), t.ownerOf(k), began)
	}
}

// ownerOf returns the owner of a counter. That of a draining real server, which session affinity
// may still choose, counts for the service port alone.
func (t *totals) ownerOf(k counterKey) (of counting.Owner) {
	of.Name = t.owners[k.server]
	if v := t.servers[k.server]; v != nil && v.reals[k.real] != nil && v.reals[k.real].weight > 0 && of.Name != (changetracker.ServicePortName{}) {
		of.Endpoint = k.real
	}
	return of
}

// widen returns a counter of the kernel, which has 32 bits, with 64. It is less than the last
// value only if the counter began again.
func widen(last uint64, value uint32) uint64 {
	v := last&^math.MaxUint32 | uint64(value)
	switch {
	case v >= last:
		return v
	case last-v > 1<<31:
		return v + 1<<32
	default:
		return uint64(value)
	}
}

// addNow is add with values that were read just now.
func (t *totals) addNow(server serverKey, of loads) {
	t.add(server, of, t.ledger.Clock())
}

// observe adds all counters before a full sync. What they had before the first one is nobody's.
func (t *totals) observe(all map[serverKey]*virtual) {
	if t == nil {
		return
	}
	t.ledger.Begin(time.Now())
	for key, v := range all {
		t.addNow(key, v.loads)
	}
	for key, reals := range t.departed {
		if all[key] == nil {
			t.forget(key)
			continue
		}
		maps.DeleteFunc(reals, func(real netip.AddrPort, at time.Time) bool {
			old := time.Since(at) > memory
			if old {
				t.ledger.Forget(counterKey{key, real})
			}
			return old
		})
	}
}

// forget is called after a virtual server was deleted, with its real servers: their counters
// begin at 0.
func (t *totals) forget(key serverKey) {
	for real := range t.departed[key] {
		t.ledger.Forget(counterKey{key, real})
	}
	delete(t.departed, key)
}

// depart is called after a real server was deleted.
func (t *totals) depart(key serverKey, real netip.AddrPort) {
	if t.departed[key] == nil {
		t.departed[key] = map[netip.AddrPort]time.Time{}
	}
	t.departed[key][real] = time.Now()
}

// account adds the counters of the real servers of a virtual server, if connections are counted.
func (t *table) account(key serverKey) error {
	if t.totals == nil || t.virtuals[key] == nil {
		return nil
	}
	values, err := t.kernel.Loads(key)
	if err != nil {
		return fmt.Errorf("count connections of virtual server %v: %w", key, err)
	}
	t.totals.addNow(key, values)
	return nil
}

// accountReturned is account if one of the real servers was deleted before. Connections are counted.
func (t *table) accountReturned(key serverKey, created []netip.AddrPort) error {
	departed := t.totals.departed[key]
	before := len(departed)
	for _, real := range created {
		delete(departed, real)
	}
	if len(departed) == before {
		return nil
	}
	return t.account(key)
}
