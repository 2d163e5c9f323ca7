package nftables

import (
	"context"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	engine "github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine programs one IP family by netlink. Calls must not overlap, but Watch and Counts run beside all
// others.
type Engine struct{ engine *engine.Engine }

// NewEngine returns the engine of one family. It opens no socket and writes
// nothing before the first Apply.
func NewEngine(config Config, family v1.IPFamily, deps proxier.Deps) (*Engine, error) {
	e, err := engine.NewEngine(engine.Config(config), family, deps)
	if err != nil {
		return nil, err
	}
	return &Engine{e}, nil
}

// New returns a Provider with an nftables engine for each family of the config. It also
// deletes stale UDP flows and serves health check node ports, unless deps replace that.
func New(config Config, deps proxier.Deps) (*proxier.Proxier, error) {
	return engine.New(engine.Config(config), deps)
}

// Apply implements proxier.Engine. It fails for all service ports or none.
func (e *Engine) Apply(ctx context.Context, update desired.Update) (proxier.Result, error) {
	return e.engine.Apply(ctx, update)
}

// Cleanup implements proxier.Engine: it deletes the table.
func (e *Engine) Cleanup(ctx context.Context) error { return e.engine.Cleanup(ctx) }

// Close closes the netlink socket. The kernel objects stay. A later call opens a
// new socket.
func (e *Engine) Close() error { return e.engine.Close() }

// Traits implements proxier.Engine.
func (e *Engine) Traits(s *desired.Service) desired.Traits { return e.engine.Traits(s) }

// Abilities implements proxier.Engine. Watch pauses during our own large changes, which it would slow down
// tenfold; it then compares the numbers of transactions. The text of Plan is for people: rules are in nft's
// syntax, and each element has a line; nft cannot load it. Dump reads the elements and the names of the chains
// from the kernel, and prints the rules that the engine wants in them. Verify compares the table, its sets
// and chains, each element, and the expressions of each rule, but no records of session affinity.
func (e *Engine) Abilities() proxier.Abilities { return e.engine.Abilities() }
