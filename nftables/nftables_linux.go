package nftables

import (
	"context"
	"io"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	engine "github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// Engine programs one IP family by netlink. It implements proxier.Engine, Planner, Dumper,
// Watcher, Verifier and Counter. Calls must not overlap, but Watch and Counts run beside all others.
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

// OwnsNames is true, see proxier.Engine: the table has the name of the instance.
func (e *Engine) OwnsNames() bool { return e.engine.OwnsNames() }

// Watch implements proxier.Watcher: the kernel reports each change of nf_tables. Watch
// pauses during our own large changes, which it would slow down tenfold; it then compares
// the numbers of transactions.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	return e.engine.Watch(ctx, damaged)
}

// Plan implements proxier.Planner. The text is for people: rules are in nft's syntax, and
// each element has a line. nft cannot load it.
func (e *Engine) Plan(update desired.Update) (string, error) { return e.engine.Plan(update) }

// Dump implements proxier.Dumper: it reads the elements and the names of the chains from
// the kernel. It prints the rules that the engine wants in them.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error { return e.engine.Dump(ctx, w) }

// Counts implements proxier.Counter: it reads the counters from the kernel.
func (e *Engine) Counts(ctx context.Context) (proxier.Counts, error) { return e.engine.Counts(ctx) }

// Verify implements proxier.Verifier: it compares the table, its sets and chains, each
// element, and the expressions of each rule. Records of session affinity are not compared.
func (e *Engine) Verify(ctx context.Context, update desired.Update) (proxier.VerifyReport, error) {
	return e.engine.Verify(ctx, update)
}
