package proxier

import (
	"iter"
	"maps"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// flowTracker decides for which frontends the conntrack table must be searched for stale
// flows. It is owned by the goroutine that syncs the family.
type flowTracker struct {
	tracks     func(*desired.Service, *Result) bool
	ends       func(*desired.Service, *Result) desired.Endpoints // of flows that may continue
	programmed map[changetracker.ServicePortName]portFlows
	pending    map[desired.Key]desired.Flows // to be searched for
	added      int                           // counts what has become pending
	cleans     bool                          // there is a Conntrack
	// untranslated are frontends of TCP that are not tracked, to be searched for flows that began
	// without rules. Those of suspected service ports, or of all, follow when they are programmed.
	untranslated []desired.Flows
	suspected    map[changetracker.ServicePortName]bool
	allSuspected bool
	// serviceCIDRs includes all ClusterIPs in the next search: an earlier process may have
	// left stale flows of Services that do not exist any more.
	serviceCIDRs bool
}

// portFlows are the frontends of one service port, and where its flows may end.
type portFlows struct {
	frontends []desired.Flows // sorted by Key
	ends      desired.Endpoints
}

func newFlowTracker(c Conntrack) *flowTracker {
	t := &flowTracker{
		programmed: map[changetracker.ServicePortName]portFlows{}, pending: map[desired.Key]desired.Flows{},
		suspected: map[changetracker.ServicePortName]bool{},
	}
	t.tracks, t.ends = func(*desired.Service, *Result) bool { return false }, servingEnds
	if c != nil {
		t.tracks = func(s *desired.Service, _ *Result) bool { return c.Tracks(s.Protocol) }
		t.cleans, t.serviceCIDRs, t.allSuspected = true, true, true
	}
	return t
}

func servingEnds(s *desired.Service, result *Result) desired.Endpoints {
	if ends, terminated := result.FlowEnds[s.Name]; terminated {
		return desired.EndpointsOf(ends...)
	}
	return s.Serving
}

// update takes over what an Update has programmed.
func (t *flowTracker) update(state *changetracker.State, u *desired.Update, result *Result) {
	changed := map[changetracker.ServicePortName]portFlows{}
	for s := range u.Services() {
		if t.tracks(s, result) {
			changed[s.Name] = portFlowsOf(s, t.ends(s, result))
		}
	}
	gone := slices.Collect(u.Removed())
	if u.Full {
		for name := range t.programmed {
			if _, ok := state.Service(name); !ok {
				gone = append(gone, name)
			}
		}
	}
	failed := map[changetracker.ServicePortName]bool{} // still as before, also those to remove
	for _, e := range failures(result.Failed) {
		delete(changed, e.Name)
		failed[e.Name] = true
	}
	gone = slices.DeleteFunc(gone, func(name changetracker.ServicePortName) bool { return failed[name] })
	// A frontend may move from one service port to another: remove before adding.
	for _, name := range gone {
		t.removeFrontends(name, portFlows{})
		delete(t.programmed, name)
	}
	for name, flows := range changed {
		t.removeFrontends(name, flows)
	}
	for name, flows := range changed {
		t.addFrontends(t.programmed[name], flows)
		t.programmed[name] = flows
	}
	if t.cleans {
		t.addLeft(u, result)
		t.addUntranslated(u, result, failed)
	}
}

// addLeft makes the flows of frontends pending that an earlier process had.
func (t *flowTracker) addLeft(u *desired.Update, result *Result) {
	for _, key := range result.Left {
		if _, owned := u.Now.Owner(key); !owned {
			t.pending[key] = desired.Flows{Key: key, Gone: true}
			t.added++
		}
	}
}

// addUntranslated makes the frontends of TCP untranslated that are new, or whose service ports are
// suspected.
func (t *flowTracker) addUntranslated(u *desired.Update, result *Result, failed map[changetracker.ServicePortName]bool) {
	for s := range u.Services() {
		suspected := t.allSuspected || t.suspected[s.Name]
		switch {
		case failed[s.Name]:
			t.suspected[s.Name] = suspected
		case s.Protocol == desired.TCP && !t.tracks(s, result):
			for i := range s.Frontends {
				f := &s.Frontends[i]
				if _, known := u.Was.Owner(s.Key(f)); suspected || !known {
					t.untranslated = append(t.untranslated, t.begun(s, f, result))
				}
			}
		}
	}
	t.allSuspected = t.allSuspected && !u.Full
	maps.DeleteFunc(t.suspected, func(name changetracker.ServicePortName, _ bool) bool { return !failed[name] })
}

// begun are the flows of a frontend of TCP that may have begun before it was programmed.
func (t *flowTracker) begun(s *desired.Service, f *desired.Frontend, result *Result) desired.Flows {
	flows := desired.FlowsOf(s, f, t.ends(s, result))
	if sockets, terminated := result.FlowEnds[s.Name]; terminated && t.serviceCIDRs { // the process begins
		// An earlier engine may have led clients to the endpoints themselves.
		flows.Serving = desired.EndpointsOf(slices.Concat(sockets, s.Serving.Slice())...)
		for _, at := range sockets {
			if !slices.Contains(flows.Own, at.Addr()) {
				flows.Own = append(flows.Own, at.Addr())
			}
		}
	}
	return flows
}

func portFlowsOf(s *desired.Service, ends desired.Endpoints) portFlows {
	p := portFlows{ends: ends}
	for i := range s.Frontends {
		p.frontends = append(p.frontends, desired.FlowsOf(s, &s.Frontends[i], p.ends))
	}
	return p
}

// find returns the frontend with a key, or nil.
func (p portFlows) find(key desired.Key) *desired.Flows {
	i, ok := slices.BinarySearchFunc(p.frontends, key, func(f desired.Flows, key desired.Key) int { return f.Key.Compare(key) })
	if !ok {
		return nil
	}
	return &p.frontends[i]
}

// removeFrontends makes the flows of frontends pending that a service port has lost.
func (t *flowTracker) removeFrontends(name changetracker.ServicePortName, now portFlows) {
	for _, f := range t.programmed[name].frontends {
		if now.find(f.Key) == nil {
			t.pending[f.Key] = desired.Flows{Key: f.Key, Gone: true}
			t.added++
		}
	}
}

// suspect makes all flows of service ports pending: some may have begun while rules were
// missing. They were not translated, and stay so for as long as their clients send.
func (t *flowTracker) suspect(names iter.Seq[changetracker.ServicePortName]) {
	for name := range names {
		t.suspected[name] = true
		for _, f := range t.programmed[name].frontends {
			t.pending[f.Key] = f
			t.added++
		}
	}
}

// suspectAll is suspect for all service ports.
func (t *flowTracker) suspectAll() {
	t.suspect(maps.Keys(t.programmed))
	t.allSuspected = t.cleans
}

// addFrontends makes the flows of frontends pending that may be stale: those of new
// frontends, of frontends with other source ranges, and all flows of a service port that
// has lost an endpoint or got its first one. It also updates flows that are pending already.
func (t *flowTracker) addFrontends(before, now portFlows) {
	_, lost := now.ends.Changes(before.ends)
	all := before.ends.Len() == 0 && now.ends.Len() > 0 || len(lost) > 0
	for _, f := range now.frontends {
		_, isPending := t.pending[f.Key]
		old := before.find(f.Key)
		changed := all || old == nil || f.Narrower(old)
		if changed {
			t.added++
		}
		if changed || isPending {
			t.pending[f.Key] = f
		}
	}
}

// check returns the pending flows; ok is false if there are none.
func (t *flowTracker) check(g *desired.Globals, traits desired.Traits) (c desired.FlowCheck, ok bool) {
	c = desired.NewFlowCheck(g, traits, slices.Collect(maps.Values(t.pending))...)
	if t.serviceCIDRs {
		c.ServiceCIDRs = g.ServiceCIDRs
	}
	c.Untranslated = t.untranslated
	return c, len(c.Frontends)+len(c.ServiceCIDRs)+len(c.Untranslated) > 0
}

// done clears the pending flows after they were deleted.
func (t *flowTracker) done() {
	clear(t.pending)
	t.serviceCIDRs, t.untranslated = false, nil
}
