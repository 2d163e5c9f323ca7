package ebpf

import (
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
)

// Interrupt calls step before each change of maps, links and pins.
func (e *Engine) Interrupt(step func()) {
	e.step = step
	e.wrap = func(t *tables) kernel { return interrupted{t, step} }
}

// interrupted are maps whose changes are preceded by a call.
type interrupted struct {
	*tables

	step func()
}

func (k interrupted) putFrontends(frontends map[netip.AddrPort]place) error {
	k.step()
	return k.tables.putFrontends(frontends)
}

func (k interrupted) removeFrontends(keys []netip.AddrPort) error {
	k.step()
	return k.tables.removeFrontends(keys)
}

func (k interrupted) setPick(at place, p pick) {
	k.step()
	k.tables.setPick(at, p)
}

func (k interrupted) setEndpoints(first uint32, endpoints desired.Endpoints) {
	k.step()
	k.tables.setEndpoints(first, endpoints)
}

func (k interrupted) settle() error {
	k.step()
	return k.tables.settle()
}
