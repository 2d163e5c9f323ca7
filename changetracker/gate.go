package changetracker

import "slices"

// Input is a source of data that the first sync needs.
type Input string

// The Inputs of a Tracker.
const (
	InputServices       Input = "Services"
	InputEndpointSlices Input = "EndpointSlices"
	// InputNode is the node. It is awaited only with Options.AwaitNode.
	InputNode Input = "Node"
)

// SourceInput is the Input of the named Source. It is awaited only with Options.AwaitSources.
func SourceInput(name string) Input { return Input("source " + name) }

// gate is open when all inputs are known. The store's lock guards it, except for open.
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
