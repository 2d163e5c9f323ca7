package nodeproxy

import (
	"slices"

	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/packettrace"
)

// socketOptions adds to the options of the debug handler at the socket: its clients may follow
// packets through the rules of the node. Mode userspace has no traces.
func (o *options) socketOptions(p *testedProxy, list []debughttp.Option) []debughttp.Option {
	if o.mode() == modeUserspace {
		return list
	}
	names := o.names(new(faults)) // checked before
	return append(slices.Clip(list), debughttp.WithTracer(packettrace.New(p.Explain, names, "")))
}
