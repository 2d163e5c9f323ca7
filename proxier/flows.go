package proxier

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Conntrack forgets flows whose endpoint is gone. The kernel would go on sending
// a client's datagrams there for as long as the client does not pause.
type Conntrack interface {
	// Tracks says whether the flows of a protocol are looked after. It must always
	// give the same answer.
	Tracks(protocol desired.Protocol) bool
	// Clean deletes the stale flows of some frontends, and returns how many. Calls
	// for both families may overlap. After an error it is called again, with what
	// is still to do.
	Clean(ctx context.Context, family v1.IPFamily, check desired.FlowCheck) (deleted int, err error)
}

// flowTracker knows the frontends and servers of the service ports whose flows are
// looked after, and what there is still to do. It is owned by the goroutine that
// syncs the family.
type flowTracker struct {
	tracks  func(desired.Protocol) bool
	known   map[changetracker.ServicePortName]portFlows
	pending map[desired.Key]desired.Flows
	// everything is to be looked at once: who knows what a predecessor has left.
	everything bool
}

// portFlows are the frontends of one service port, and its servers.
type portFlows struct {
	frontends []desired.Flows // in order of Key
	servers   []netip.AddrPort
}

func newFlowTracker(c Conntrack) *flowTracker {
	t := &flowTracker{known: map[changetracker.ServicePortName]portFlows{}, pending: map[desired.Key]desired.Flows{}}
	t.tracks = func(desired.Protocol) bool { return false }
	if c != nil {
		t.tracks, t.everything = c.Tracks, true
	}
	return t
}

// update notes what is programmed now.
func (t *flowTracker) update(state *changetracker.State, u *desired.Update, result *Result) {
	changed := map[changetracker.ServicePortName]portFlows{}
	for s := range u.Services() {
		if t.tracks(s.Protocol) {
			changed[s.Name] = portFlowsOf(s, result)
		}
	}
	gone := slices.Collect(u.Removed())
	if u.Full {
		for name := range t.known {
			if _, ok := state.Service(name); !ok {
				gone = append(gone, name)
			}
		}
	}
	failed := map[changetracker.ServicePortName]bool{} // they are as before, also what was to go
	for _, e := range failures(result.Failed) {
		delete(changed, e.Name)
		failed[e.Name] = true
	}
	gone = slices.DeleteFunc(gone, func(name changetracker.ServicePortName) bool { return failed[name] })
	// A frontend may change hands: first all that lose it, then who gets it.
	for _, name := range gone {
		t.lose(name, portFlows{})
		delete(t.known, name)
	}
	for name, flows := range changed {
		t.lose(name, flows)
	}
	for name, flows := range changed {
		t.take(t.known[name], flows)
		t.known[name] = flows
	}
}

func portFlowsOf(s *desired.Service, result *Result) portFlows {
	p := portFlows{servers: s.Serving}
	if ends, relayed := result.FlowEnds[s.Name]; relayed {
		p.servers = ends
	}
	for i := range s.Frontends {
		p.frontends = append(p.frontends, desired.FlowsOf(s, &s.Frontends[i], p.servers))
	}
	return p
}

// find returns a frontend, nil if it has none of this key.
func (p portFlows) find(key desired.Key) *desired.Flows {
	i, ok := slices.BinarySearchFunc(p.frontends, key, func(f desired.Flows, key desired.Key) int { return f.Key.Compare(key) })
	if !ok {
		return nil
	}
	return &p.frontends[i]
}

// lose notes the frontends that a service port had and does not have any more.
func (t *flowTracker) lose(name changetracker.ServicePortName, now portFlows) {
	for _, f := range t.known[name].frontends {
		if now.find(f.Key) == nil {
			t.pending[f.Key] = desired.Flows{Key: f.Key, Gone: true}
		}
	}
}

// take notes the frontends of a service port whose flows may be stale: new ones,
// those with other source ranges, and all when an endpoint has gone or the first one
// has come. What is pending must not hold on to what was yesterday.
func (t *flowTracker) take(before, now portFlows) {
	all := len(before.servers) == 0 && len(now.servers) > 0 || lost(before.servers, now.servers)
	for _, f := range now.frontends {
		_, isPending := t.pending[f.Key]
		if old := before.find(f.Key); all || isPending || old == nil || f.Narrower(old) {
			t.pending[f.Key] = f
		}
	}
}

// lost says whether one of the servers is not there any more.
func lost(before, now []netip.AddrPort) bool {
	return slices.ContainsFunc(before, func(server netip.AddrPort) bool {
		_, ok := slices.BinarySearchFunc(now, server, netip.AddrPort.Compare)
		return !ok
	})
}

// check is what there is to do; ok is false when there is nothing.
func (t *flowTracker) check(g *desired.Globals, traits desired.Traits) (c desired.FlowCheck, ok bool) {
	c = desired.NewFlowCheck(g, traits, slices.Collect(maps.Values(t.pending))...)
	if t.everything {
		c.ServiceCIDRs = g.ServiceCIDRs
	}
	return c, len(c.Frontends)+len(c.ServiceCIDRs) > 0
}

func (t *flowTracker) done() {
	clear(t.pending)
	t.everything = false
}

// cleanFlows does what is pending, if anything. What cannot be done stays pending.
// A kernel that cannot do it at all makes no sync fail.
func (f *family) cleanFlows(ctx context.Context) (deleted int, checked bool, err error) {
	check, ok := f.flows.check(&f.globals, f.engine.Traits(nil))
	if !ok {
		return 0, false, nil
	}
	deleted, err = f.conntrack.Clean(ctx, f.name, check)
	for f.mayBeLoading(ctx, err) {
		deleted, err = f.conntrack.Clean(ctx, f.name, check)
	}
	if err == nil {
		f.flows.done()
	}
	if err != nil {
		err = fmt.Errorf("clean connection tracking: %w", err)
	}
	f.noteFlows(err)
	if errors.Is(err, ErrNotSupported) {
		return deleted, true, nil
	}
	return deleted, true, err
}

// noteFlows keeps the condition of a family's flows.
func (f *family) noteFlows(err error) {
	f.mu.Lock()
	before := f.staleFlows
	switch {
	case err == nil:
		f.staleFlows = Condition{}
	case before.Type == "":
		f.staleFlows = Condition{Type: ConditionStaleFlows, Since: time.Now(), Message: err.Error()}
	default:
		f.staleFlows.Message = err.Error()
	}
	f.mu.Unlock()
	if err != nil && before.Type == "" {
		f.log.Warn("stale flows are not forgotten", zap.Error(err))
	}
}
