package changetracker

import "slices"

// Input is a part of what a first sync must know.
type Input string

// The Inputs of a Tracker.
const (
	InputServices       Input = "Services"
	InputEndpointSlices Input = "EndpointSlices"
	// InputNode is the node. It is waited for with Options.AwaitNode only.
	InputNode Input = "Node"
)

// SourceInput is what the named Source has. It is waited for with Options.AwaitSources
// only.
func SourceInput(name string) Input { return Input("source " + name) }

// gate is open when all inputs are known. It is guarded by store.mu, but for open.
type gate struct {
	waiting []Input // sorted
	open    chan struct{}
}

func newGate(o *Options) gate {
	g := gate{waiting: []Input{InputEndpointSlices, InputServices}, open: make(chan struct{})}
	if o.AwaitNode {
		g.waiting = append(g.waiting, InputNode)
	}
	for _, name := range o.AwaitSources {
		g.waiting = append(g.waiting, SourceInput(name))
	}
	slices.Sort(g.waiting)
	return g
}

func (g *gate) known(input Input) {
	if len(g.waiting) == 0 {
		return
	}
	g.waiting = slices.DeleteFunc(g.waiting, func(i Input) bool { return i == input })
	if len(g.waiting) == 0 {
		close(g.open)
	}
}

// Synced says that an Input is known: every Service, or every EndpointSlice, that exists
// has been given to the Tracker. SetNode says so of the node. A sync that comes before
// would take away what a proxy before this one has programmed.
func (t *Tracker) Synced(input Input) {
	t.store.mu.Lock()
	defer t.store.unlock()
	t.store.gate.known(input)
}

// Waiting lists the Inputs that are not known yet, sorted.
func (t *Tracker) Waiting() []Input {
	t.store.mu.Lock()
	defer t.store.mu.Unlock()
	return slices.Clone(t.store.gate.waiting)
}

// Ready is closed when all Inputs are known. Apply does not wait for it.
func (t *Tracker) Ready() <-chan struct{} { return t.store.gate.open }

// Changed receives a value when there is a change that no Apply has seen yet. Several
// changes may be one value: after receiving it, call Apply for each family. It is for
// programs with one goroutine that syncs; an Apply that fails is theirs to repeat. The
// channel is never closed.
func (t *Tracker) Changed() <-chan struct{} { return t.store.changed }
