package conntrack

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/counting"
	"github.com/serviceplane/serviceplane/internal/flows"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

const (
	// trafficRetry is the pause after a failure.
	trafficRetry = 10 * time.Second
	// addressesAge is how old the list of node addresses may be when an unknown one accepts
	// a node port.
	addressesAge = time.Second
	// readAfter is how many listed flows come between two readings of notifications, which the
	// kernel stores in a buffer of limited size.
	readAfter = 512

	notRunning = "the proxy does not run"
)

// traffic counts the traffic of both families.
type traffic struct {
	netNS string
	seed  maphash.Seed

	pendingMu sync.Mutex
	pending   []func() // updates to take over, so that no sync waits for a reading; guarded by pendingMu

	mu       sync.Mutex // guards all below
	families map[v1.IPFamily]*familyTraffic
	events   *netlinkx.Ended // nil: not running
	begun    bool
	problem  string // why it does not run
	losses   uint64
}

// familyTraffic is the traffic of one family.
type familyTraffic struct {
	name   v1.IPFamily
	netNS  string
	ledger *counting.Traffic
	check  desired.FlowCheck
	judge  *flows.Judge // nil: make one
	judged time.Time    // when it was made
}

func newTraffic(netNS string) *traffic {
	t := &traffic{netNS: netNS, seed: maphash.MakeSeed(), families: map[v1.IPFamily]*familyTraffic{}, problem: notRunning}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		t.families[family] = &familyTraffic{name: family, netNS: netNS, ledger: counting.NewTraffic()}
	}
	return t
}

// RunTraffic is for proxier.Conntrack.
func (c *cleaner) RunTraffic(ctx context.Context, log *zap.Logger, begun func()) error {
	for ctx.Err() == nil {
		err := classify(c.traffic.run(ctx, log, begun))
		begun()
		if err == nil {
			break
		}
		c.traffic.stopped(err, log)
		select {
		case <-ctx.Done():
		case <-time.After(trafficRetry):
		}
	}
	return nil
}

// FollowTraffic is for proxier.Conntrack.
func (c *cleaner) FollowTraffic(family v1.IPFamily, outcomes []desired.Applied, check desired.FlowCheck, selected func(*desired.Service) bool) {
	t := c.traffic
	t.pendingMu.Lock()
	t.pending = append(t.pending, func() {
		f := t.families[family]
		f.check, f.judge = check, nil
		f.ledger.Applied(outcomes, selected)
	})
	t.pendingMu.Unlock()
	if t.mu.TryLock() { // otherwise who holds it takes them over
		t.unlock()
	}
}

// AddTraffic is for proxier.Conntrack. It lists the open flows of the family.
func (c *cleaner) AddTraffic(ctx context.Context, family v1.IPFamily, counts connection.Counts) (connection.Counts, error) {
	t := c.traffic
	t.mu.Lock()
	defer t.unlock()
	if err := ctx.Err(); err != nil {
		return connection.Counts{}, err
	}
	f := t.families[family]
	if t.events != nil {
		if err := t.list(f); err != nil {
			return connection.Counts{}, classify(err)
		}
	}
	own := f.ledger.Counts()
	own.TrafficProblem, own.TrafficLosses = t.problem, t.losses
	if t.problem == "" {
		own.TrafficProblem = t.unaccounted()
	}
	if own.Traffic = own.TrafficProblem == ""; own.Traffic {
		own.TrafficProblem = t.uncounted(ctx)
	}
	return counting.Sum(counts, own), nil
}

// unlock takes over pending updates, and unlocks mu.
func (t *traffic) unlock() {
	for {
		for _, apply := range t.takePending() {
			apply()
		}
		t.mu.Unlock()
		t.pendingMu.Lock()
		more := len(t.pending) > 0
		t.pendingMu.Unlock()
		if !more || !t.mu.TryLock() {
			return
		}
	}
}

func (t *traffic) takePending() (all []func()) {
	t.pendingMu.Lock()
	defer t.pendingMu.Unlock()
	all, t.pending = t.pending, nil
	return all
}

// run counts until ctx ends, or until it fails.
func (t *traffic) run(ctx context.Context, log *zap.Logger, begun func()) error {
	events, err := netlinkx.OpenEnded(t.netNS)
	if err != nil {
		return err
	}
	defer func() {
		events.Close()
		t.mu.Lock()
		defer t.unlock()
		t.events, t.problem = nil, cmp.Or(t.problem, notRunning)
	}()
	if err := t.begin(events, log); err != nil {
		return err
	}
	begun()
	return events.Wait(ctx, func() error {
		t.mu.Lock()
		defer t.unlock()
		return t.read()
	})
}

// begin notes the traffic of the flows that are open, or, if it has begun before, counts it.
func (t *traffic) begin(events *netlinkx.Ended, log *zap.Logger) error {
	t.mu.Lock()
	defer t.unlock()
	t.events = events
	if !t.begun {
		for _, f := range t.families {
			f.judge = nil
			if err := f.each(func(flow *netlinkx.Flow) { f.ledger.Begin(t.seen(flow)) }); err != nil {
				return err
			}
		}
		for _, f := range t.families {
			f.ledger.Begun(time.Now())
		}
		t.begun = true
	}
	t.problem = ""
	if problem := t.unaccounted(); problem != "" {
		log.Warn("traffic of service ports is not counted: see the reason", zap.String("reason", problem))
	}
	return nil
}

// stopped notes a failure, and logs the first of several.
func (t *traffic) stopped(err error, log *zap.Logger) {
	t.mu.Lock()
	defer t.unlock()
	if t.problem == notRunning {
		log.Warn("traffic is not counted, will be retried", zap.Error(err))
	}
	if t.problem = err.Error(); t.begun {
		t.losses++
	}
}

// read takes the notifications that are there. The caller holds mu.
func (t *traffic) read() error {
	lost, err := t.events.Read(func(flow *netlinkx.Flow) {
		f := t.families[v1.IPv6Protocol]
		if flow.Destination.Addr().Is4() {
			f = t.families[v1.IPv4Protocol]
		}
		f.ledger.Ended(t.seen(flow), f.acceptsNodePorts)
	})
	t.losses += lost
	return err
}

// list takes the flows of a family that are open, and the notifications up to then.
func (t *traffic) list(f *familyTraffic) error {
	if err := t.read(); err != nil {
		return err
	}
	f.judge = nil // node addresses may have changed
	f.ledger.BeginListing()
	var failed error
	n := 0
	err := f.each(func(flow *netlinkx.Flow) {
		f.ledger.Listed(t.seen(flow), f.acceptsNodePorts)
		if n++; n%readAfter == 0 && failed == nil {
			failed = t.read()
		}
	})
	if err != nil {
		return err
	}
	if failed == nil {
		failed = t.read()
	}
	if failed == nil {
		f.ledger.EndListing()
	}
	return failed
}

// seen returns what the ledger needs of a flow.
func (t *traffic) seen(f *netlinkx.Flow) *counting.Seen {
	to, from, _ := f.Volumes()
	return &counting.Seen{
		Identity: f.Hash(t.seed),
		Flow:     flows.Flow{Protocol: desired.Protocol(f.Protocol), Client: f.Source, Dialled: f.Destination, Server: f.Server},
		Traffic:  connection.Traffic{PacketsIn: to.Packets, BytesIn: to.Bytes, PacketsOut: from.Packets, BytesOut: from.Bytes},
	}
}

// unaccounted says why the kernel does not count the traffic of new flows, if so.
func (t *traffic) unaccounted() (problem string) {
	const path = "/proc/sys/net/netfilter/nf_conntrack_acct"
	err := namespace.Visit(t.netNS, func() error {
		value, err := os.ReadFile(path)
		if err == nil && strings.TrimSpace(string(value)) == "0" {
			problem = "net.netfilter.nf_conntrack_acct is 0: set it to 1, connections from then on count"
		}
		return err
	})
	if err != nil {
		problem = fmt.Sprintf("kernel setting of traffic is unknown: %v", err)
	}
	return problem
}

// uncounted names a flowtable whose packets the kernel does not count, if there is one. A kernel without
// flowtables has none.
func (t *traffic) uncounted(ctx context.Context) (problem string) {
	flowtable := nft.FindFlowtable(ctx, t.netNS, func(flags uint32) bool { return flags&nft.FlowtableCounter == 0 })
	if flowtable == "" {
		return ""
	}
	return flowtable + " has no counter, so the traffic in it is missing: let its program add one, or not use it"
}

// each calls do for each flow that is open.
func (f *familyTraffic) each(do func(*netlinkx.Flow)) error {
	s, err := netlinkx.Open(f.netNS)
	if err != nil {
		return err
	}
	defer s.Close()
	return netlinkx.ListFlows(context.Background(), s, uint8(number(f.name)), do) //nolint:forbidigo // a part of a list is no list
}

// acceptsNodePorts reports whether an address accepts node ports.
func (f *familyTraffic) acceptsNodePorts(addr netip.Addr) bool {
	if f.judge != nil && (f.judge.AcceptsNodePorts(addr) || time.Since(f.judged) < addressesAge) {
		return f.judge.AcceptsNodePorts(addr)
	}
	s, err := netlinkx.Open(f.netNS)
	if err != nil {
		return false
	}
	defer s.Close()
	addrs, err := s.Addresses(number(f.name))
	if err != nil {
		return false
	}
	f.judge, f.judged = flows.NewJudge(f.check, addrs), time.Now()
	return f.judge.AcceptsNodePorts(addr)
}
