package proxier

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// flowTracker decides for which frontends the conntrack table must be searched for stale
// flows. It is owned by the goroutine that syncs the family.
type flowTracker struct {
	tracks func(s *desired.Service, terminated bool) bool
	endsOf func(*desired.Service) desired.Endpoints // of flows that may continue
	// sockets are those at which the engine terminates the flows of a service port.
	sockets map[changetracker.ServicePortName][]netip.AddrPort
	pending map[desired.Key]desired.Flows // to be searched for
	added   int                           // counts what has become pending
	// unseen are frontends of service ports that have failed since the process began: an earlier one
	// may have programmed them.
	unseen map[changetracker.ServicePortName][]desired.Key
	cleans bool // there is a Conntrack
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

func newFlowTracker(c *Conntrack) *flowTracker {
	t := &flowTracker{
		sockets: map[changetracker.ServicePortName][]netip.AddrPort{}, pending: map[desired.Key]desired.Flows{},
		suspected: map[changetracker.ServicePortName]bool{}, unseen: map[changetracker.ServicePortName][]desired.Key{},
		tracks: func(*desired.Service, bool) bool { return false },
		endsOf: func(s *desired.Service) desired.Endpoints { return s.Serving },
	}
	if c != nil {
		t.tracks = func(s *desired.Service, _ bool) bool { return c.Tracks(s.Protocol) }
		t.cleans, t.serviceCIDRs, t.allSuspected = true, true, true
	}
	return t
}

// ends are where the flows of a service port may end.
func (t *flowTracker) ends(s *desired.Service) desired.Endpoints {
	if sockets, terminated := t.sockets[s.Name]; terminated {
		return desired.EndpointsOf(sockets...)
	}
	return t.endsOf(s)
}

// flowsOf returns the flows of a service port; ok is false if they are not tracked.
func (t *flowTracker) flowsOf(s *desired.Service) (p portFlows, ok bool) {
	if s == nil {
		return portFlows{}, false
	}
	if _, terminated := t.sockets[s.Name]; !t.tracks(s, terminated) {
		return portFlows{}, false
	}
	p.ends = t.ends(s)
	for i := range s.Frontends {
		p.frontends = append(p.frontends, desired.FlowsOf(s, &s.Frontends[i], p.ends))
	}
	return p, true
}

// update takes over what became of service ports.
func (t *flowTracker) update(outcomes []desired.Applied, u *desired.Update, result *Result) {
	type change struct {
		was, is   portFlows
		suspected bool
	}
	var changes []change
	// A frontend may move from one service port to another: remove before adding.
	for i := range outcomes {
		o := &outcomes[i]
		was, _ := t.flowsOf(o.Was)
		if sockets, terminated := result.FlowEnds[o.Name]; terminated {
			t.sockets[o.Name] = sockets
		} else if !o.Failed {
			delete(t.sockets, o.Name)
		}
		is, tracked := t.flowsOf(o.Is)
		if !o.Failed {
			t.addGone(u, t.unseen[o.Name])
			delete(t.unseen, o.Name)
		} else if o.Is == nil && t.serviceCIDRs {
			wanted, _ := u.Now.Service(o.Name)
			is, tracked = t.flowsOf(wanted)
			t.unseen[o.Name] = is.keys()
		}
		if o.Is != nil && !tracked {
			t.release(o.Is)
			continue
		}
		t.removeFrontends(was, is)
		if tracked {
			changes = append(changes, change{was, is, t.allSuspected || t.suspected[o.Name]})
		}
	}
	for i := range changes {
		t.addFrontends(changes[i].was, changes[i].is, changes[i].suspected)
	}
	if t.cleans {
		t.addGone(u, result.Left)
		t.addUntranslated(outcomes, u, result)
	}
}

// release forgets the frontends of a service port that is not tracked. They may have belonged to one
// that is.
func (t *flowTracker) release(s *desired.Service) {
	if len(t.pending) == 0 {
		return
	}
	for i := range s.Frontends {
		delete(t.pending, s.Key(&s.Frontends[i]))
	}
}

// addGone makes the flows of frontends pending that no service port has.
func (t *flowTracker) addGone(u *desired.Update, keys []desired.Key) {
	for _, key := range keys {
		if _, owned := u.Now.Owner(key); !owned {
			t.pending[key] = desired.Flows{Key: key, Gone: true}
			t.added++
		}
	}
}

// addUntranslated makes the frontends of TCP untranslated that are new, or whose service ports are
// suspected.
func (t *flowTracker) addUntranslated(outcomes []desired.Applied, u *desired.Update, result *Result) {
	for i := range outcomes {
		o := &outcomes[i]
		suspected := t.allSuspected || t.suspected[o.Name]
		if o.Failed {
			if suspected {
				t.suspected[o.Name] = true
			}
			continue
		}
		delete(t.suspected, o.Name)
		if o.Is == nil || o.Is.Protocol != desired.TCP {
			continue
		}
		if _, terminated := t.sockets[o.Name]; t.tracks(o.Is, terminated) {
			continue
		}
		for i := range o.Is.Frontends {
			f := &o.Is.Frontends[i]
			if _, known := u.Was.Owner(o.Is.Key(f)); suspected || !known {
				t.untranslated = append(t.untranslated, t.begun(o.Is, f, result))
			}
		}
	}
	t.allSuspected = t.allSuspected && !u.Full
}

// begun are the flows of a frontend of TCP that may have begun before it was programmed.
func (t *flowTracker) begun(s *desired.Service, f *desired.Frontend, result *Result) desired.Flows {
	flows := desired.FlowsOf(s, f, t.ends(s))
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

func (p portFlows) keys() (all []desired.Key) {
	for i := range p.frontends {
		all = append(all, p.frontends[i].Key)
	}
	return all
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
func (t *flowTracker) removeFrontends(was, is portFlows) {
	for _, f := range was.frontends {
		if is.find(f.Key) == nil {
			t.pending[f.Key] = desired.Flows{Key: f.Key, Gone: true}
			t.added++
		}
	}
}

// recheckAll makes all flows of service ports pending when they are programmed: some may have begun while
// rules were missing. They were not translated, and stay so for as long as their clients send.
func (t *flowTracker) recheckAll(names []changetracker.ServicePortName) {
	for _, name := range names {
		t.suspected[name] = true
	}
}

// narrower reports whether flows may have become stale because the source ranges changed.
func narrower(f, before *desired.Flows) bool {
	return f.Restricted && (!before.Restricted || !slices.Equal(f.SourceRanges, before.SourceRanges))
}

// recheckEverything is recheckAll for all service ports.
func (t *flowTracker) recheckEverything() { t.allSuspected = t.cleans }

// addFrontends makes the flows of frontends pending that may be stale: all if they are suspected; those
// of new frontends, of frontends with other source ranges, and all flows of a service port that
// has lost an endpoint or got its first one. It also updates flows that are pending already.
func (t *flowTracker) addFrontends(before, now portFlows, suspected bool) {
	_, lost := now.ends.Changes(before.ends)
	all := suspected || before.ends.Len() == 0 && now.ends.Len() > 0 || len(lost) > 0
	for _, f := range now.frontends {
		_, isPending := t.pending[f.Key]
		old := before.find(f.Key)
		changed := all || old == nil || narrower(&f, old)
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
