package cluster

import (
	"context"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// quirks are faults that a test plants in its own layers: what a proxy would do to the same
// effect if it had the fault. The zero value has none.
type quirks struct {
	// Faults of a reflector.
	relistAdds, skipMissed, syncEarly bool
	// Faults of an engine, and of what hands on the events.
	engine func(*engine) proxier.Engine
	feed   func(*process, proxier.EventHandler) proxier.EventHandler
}

func (q *quirks) wrapEngine(e *engine) proxier.Engine {
	if q.engine == nil {
		return e
	}
	return q.engine(e)
}

func (q *quirks) wrapFeed(p *process, h proxier.EventHandler) proxier.EventHandler {
	if q.feed == nil {
		return h
	}
	return q.feed(p, h)
}

// planted is a fault, which the properties must catch.
type planted struct {
	name   string
	quirks quirks
}

var plantedFaults = append(plantedEngines, plantedFeeds...)

type apply = func(*engine, context.Context, desired.Update) (proxier.Result, error)

// edited is an engine with another Apply.
type edited struct {
	*engine

	apply apply
}

func (e *edited) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	return e.apply(e.engine, ctx, u)
}

func editing(a apply) quirks {
	return quirks{engine: func(e *engine) proxier.Engine { return &edited{e, a} }}
}

// leavingOut is an engine that does not see some of the changes.
func leavingOut(omit func(u *desired.Update, i int) bool) quirks {
	return editing(func(e *engine, ctx context.Context, u desired.Update) (proxier.Result, error) {
		var rest []desired.Change
		for i := range u.Changes {
			if !omit(&u, i) {
				rest = append(rest, u.Changes[i])
			}
		}
		u.Changes = rest
		return e.Apply(ctx, u)
	})
}

// misreading is an engine that takes changes for something else.
func misreading(misread func(before, after *rule) *rule) quirks {
	return editing(func(e *engine, ctx context.Context, u desired.Update) (proxier.Result, error) {
		k, before := e.node.kernel[e.family], map[changetracker.ServicePortName]*rule{}
		for i := range u.Changes {
			before[u.Changes[i].Name] = k.get(u.Changes[i].Name)
		}
		r, err := e.Apply(ctx, u)
		for name, old := range before {
			if now := k.get(name); old != nil && now != nil {
				k.set(name, misread(old, now))
			}
		}
		return r, err
	})
}

var plantedEngines = []planted{
	{"engine: a removed service port stays", leavingOut(func(u *desired.Update, i int) bool { return u.Changes[i].After == nil })},
	{"engine: the last of several changes is lost", leavingOut(func(u *desired.Update, i int) bool { return i > 0 && i == len(u.Changes)-1 })},
	{"engine: the family IPv6 is not programmed", leavingOut(func(u *desired.Update, _ int) bool { return u.Family == v1.IPv6Protocol })},
	{"engine: an endpoint that is gone stays", misreading(func(before, after *rule) *rule {
		r := &rule{after.fronts, slices.Concat(before.cluster, after.cluster), after.local}
		slices.SortFunc(r.cluster, func(a, b addrPort) int { return a.Compare(b) })
		r.cluster = slices.Compact(r.cluster)
		return r
	})},
	{"engine: a changed traffic policy has no effect", misreading(func(before, after *rule) *rule {
		return &rule{before.fronts, after.cluster, after.local}
	})},
	{"engine: policy Local gets the endpoints of all nodes", misreading(func(_, after *rule) *rule {
		if len(after.local) == 0 {
			return after
		}
		return &rule{after.fronts, after.cluster, after.cluster}
	})},
	{"engine: a full Update leaves what it does not name", editing(func(e *engine, ctx context.Context, u desired.Update) (proxier.Result, error) {
		u.Full = false
		return e.Apply(ctx, u)
	})},
	{"engine: an error counts as success", editing(func(e *engine, ctx context.Context, u desired.Update) (proxier.Result, error) {
		r, _ := e.Apply(ctx, u)
		return r, nil
	})},
	{"engine: service ports that failed are not reported", editing(func(e *engine, ctx context.Context, u desired.Update) (proxier.Result, error) {
		r, err := e.Apply(ctx, u)
		r.Failed = nil
		return r, err
	})},
	{"engine: every Apply writes everything again", editing(func(e *engine, ctx context.Context, u desired.Update) (proxier.Result, error) {
		r, err := e.Apply(ctx, u)
		k := e.node.kernel[e.family]
		for _, name := range k.names() {
			have := k.get(name)
			k.set(name, nil)
			k.set(name, have)
			r.Report.Writes++
		}
		return r, err
	})},
	{"engine: an Update is programmed when the next one comes", quirks{engine: func(e *engine) proxier.Engine {
		var held *desired.Update
		return &edited{e, func(e *engine, ctx context.Context, u desired.Update) (r proxier.Result, err error) {
			if held != nil {
				r, err = e.Apply(ctx, *held)
			}
			held = &u
			return r, err
		}}
	}}},
	{"engine: the kernel is emptied when the proxy starts", quirks{engine: func(e *engine) proxier.Engine {
		e.node.kernel[e.family].clear()
		return e
	}}},
	{"engine: the kernel is emptied when the proxy ends", quirks{engine: func(e *engine) proxier.Engine { return &emptying{e} }}},
}

// emptying is an engine that takes Close for Cleanup.
type emptying struct{ *engine }

func (e *emptying) Close() error {
	e.node.kernel[e.family].clear()
	return nil
}

// editedFeed is a feed with other handlers: those that are nil stay as they are.
type editedFeed struct {
	proxier.EventHandler

	service func(next proxier.EventHandler, before, after *v1.Service)
	slice   func(next proxier.EventHandler, before, after *discovery.EndpointSlice)
	node    func(next proxier.EventHandler, node changetracker.Node)
}

func (f *editedFeed) OnServiceAdd(s *v1.Service)            { f.OnServiceUpdate(nil, s) }
func (f *editedFeed) OnServiceDelete(s *v1.Service)         { f.OnServiceUpdate(s, nil) }
func (f *editedFeed) OnServiceUpdate(before, s *v1.Service) { f.service(f.EventHandler, before, s) }

func (f *editedFeed) OnEndpointSliceAdd(s *discovery.EndpointSlice) { f.OnEndpointSliceUpdate(nil, s) }

func (f *editedFeed) OnEndpointSliceDelete(s *discovery.EndpointSlice) {
	f.OnEndpointSliceUpdate(s, nil)
}

func (f *editedFeed) OnEndpointSliceUpdate(before, s *discovery.EndpointSlice) {
	f.slice(f.EventHandler, before, s)
}
func (f *editedFeed) OnNodeChange(n changetracker.Node) { f.node(f.EventHandler, n) }

func onService(next proxier.EventHandler, before, after *v1.Service) {
	switch {
	case before == nil:
		next.OnServiceAdd(after)
	case after == nil:
		next.OnServiceDelete(before)
	default:
		next.OnServiceUpdate(before, after)
	}
}

func onSlice(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
	switch {
	case before == nil:
		next.OnEndpointSliceAdd(after)
	case after == nil:
		next.OnEndpointSliceDelete(before)
	default:
		next.OnEndpointSliceUpdate(before, after)
	}
}

// feeding is a feed that is edited anew for each process.
func feeding(edit func(f *editedFeed, p *process)) quirks {
	return quirks{feed: func(p *process, next proxier.EventHandler) proxier.EventHandler {
		f := &editedFeed{next, onService, onSlice, proxier.EventHandler.OnNodeChange}
		edit(f, p)
		return f
	}}
}

var plantedFeeds = []planted{
	{"reflector: a list only adds", quirks{relistAdds: true}},
	{"reflector: a watch resumes at the present and skips what was missed", quirks{skipMissed: true}},
	{"feed: both kinds count as listed at once", quirks{syncEarly: true}},
	{"feed: deletions of Services are lost", feeding(func(f *editedFeed, _ *process) {
		f.service = func(next proxier.EventHandler, before, after *v1.Service) {
			if after != nil {
				onService(next, before, after)
			}
		}
	})},
	{"feed: deletions of slices are lost", feeding(func(f *editedFeed, _ *process) {
		f.slice = func(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
			if after != nil {
				onSlice(next, before, after)
			}
		}
	})},
	{"feed: an update brings the old Service", feeding(func(f *editedFeed, _ *process) {
		f.service = func(next proxier.EventHandler, before, after *v1.Service) {
			if before != nil && after != nil {
				after = before
			}
			onService(next, before, after)
		}
	})},
	{"feed: the old slice comes again after the new one", feeding(func(f *editedFeed, _ *process) {
		f.slice = func(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
			onSlice(next, before, after)
			if before != nil && after != nil {
				onSlice(next, after, before)
			}
		}
	})},
	{"feed: two events of slices change places", feeding(func(f *editedFeed, _ *process) {
		var held func()
		f.slice = func(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
			deliver := func() { onSlice(next, before, after) }
			if held == nil {
				held = deliver
				return
			}
			deliver()
			held()
			held = nil
		}
	})},
	{"feed: one event of fifty is lost", feeding(func(f *editedFeed, _ *process) {
		count := 0
		f.slice = func(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
			if count++; count%50 != 0 {
				onSlice(next, before, after)
			}
		}
	})},
	{"feed: slices wait for a second", feeding(func(f *editedFeed, p *process) {
		f.slice = func(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
			p.node.sim.after(time.Second, func() { onSlice(next, before, after) })
		}
	})},
	{"feed: a slice without its Service is dropped", feeding(func(f *editedFeed, _ *process) {
		known := map[string]bool{}
		f.service = func(next proxier.EventHandler, before, after *v1.Service) {
			if after != nil {
				known[after.Name] = true
			} else {
				delete(known, before.Name)
			}
			onService(next, before, after)
		}
		f.slice = func(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
			if after == nil || known[after.Labels[discovery.LabelServiceName]] {
				onSlice(next, before, after)
			}
		}
	})},
	{"feed: changes of the node are lost", feeding(func(f *editedFeed, _ *process) {
		f.node = func(proxier.EventHandler, changetracker.Node) {}
	})},
	{"feed: a version is said before its event", feeding(func(f *editedFeed, p *process) {
		f.service = func(next proxier.EventHandler, before, after *v1.Service) {
			next.OnVersion(changetracker.InputServices, p.reflect[servicesKind].version())
			onService(next, before, after)
		}
		f.slice = func(next proxier.EventHandler, before, after *discovery.EndpointSlice) {
			next.OnVersion(changetracker.InputEndpointSlices, p.reflect[slicesKind].version())
			onSlice(next, before, after)
		}
	})},
}
