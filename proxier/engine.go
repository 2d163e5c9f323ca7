package proxier

import (
	"context"
	"io"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Engine is one IP family's data plane. Calls of Apply, Cleanup and Close never overlap.
//
// What an engine can do beside it says by further methods, which it may have or not:
//   - Watch, Plan and Dump, see Watcher, Planner and Dumper.
//   - OwnsNames() bool: true says that it writes objects with the instance's Names, of
//     which a network namespace has one set. Its Proxier keeps all others that have one
//     of these Names, of this process or another one, from writing in the same IP family,
//     from its first sync until its Run ends: see ErrInUse.
//   - Descriptors() connection.Descriptors: what its clients use of this process; Limit is
//     0 if nothing is counted. It may be called at any time, and must return soon.
//
// An engine that wraps another one and passes its Updates on unchanged has a method
// Unwrap() Engine, so that As finds these; an engine that is made of several has the
// methods itself and asks its members, as package hybrid does.
type Engine interface {
	// Apply brings the data plane to the Update. It is idempotent: applying the same
	// Update again writes nothing. An error means that nothing of the Update counts as
	// programmed, and that the next one is full. What only some service ports failed of is in
	// Result.Failed.
	Apply(ctx context.Context, update desired.Update) (Result, error)
	// Cleanup removes every kernel object of this instance, and nothing else.
	// Objects that are not there are no error.
	Cleanup(ctx context.Context) error
	// Close frees what the engine holds in this process. Kernel objects stay. A later
	// Apply, which is full, begins anew.
	Close() error
	// Traits are what packets can see of the engine's own ways: of a service port, or
	// with nil of addresses without one. They depend on its configuration only, and may
	// be asked for at any time.
	Traits(s *desired.Service) desired.Traits
}

// Result is what one Apply came to. After an error only its Report counts.
type Result struct {
	// Failed are the service ports that are not as the Update wants them, in any order.
	// They are retried. A service port that is not in the Update may be among them.
	Failed []*ServiceError
	// Report is what was written.
	Report ApplyReport
	// FlowEnds is for engines that take part in connections themselves: as connection
	// tracking sees it, the flows of a service port end at the engine's sockets. It has
	// these, sorted, for each service port of the Update; flows of those that it has not
	// end at their endpoints.
	FlowEnds map[changetracker.ServicePortName][]netip.AddrPort
}

// As returns the first engine that is a T: e itself, or one that it unwraps to.
func As[T any](e Engine) (t T, ok bool) {
	for e != nil {
		if t, ok = e.(T); ok {
			return t, true
		}
		wrapper, wraps := e.(interface{ Unwrap() Engine })
		if !wraps {
			break
		}
		e = wrapper.Unwrap()
	}
	return t, false
}

// Planner is an Engine that can tell what Apply would program from scratch. It
// needs no privilege and touches no kernel.
type Planner interface {
	// Plan returns an error that is errors.ErrUnsupported if no part of the engine can.
	Plan(update desired.Update) (text string, err error)
}

// Dumper is an Engine that can print what the kernel holds for it.
type Dumper interface {
	// Dump returns an error that is errors.ErrUnsupported if no part of the engine can.
	Dump(ctx context.Context, w io.Writer) error
}

// Watcher is an Engine that notices when somebody else changes its objects.
type Watcher interface {
	// Watch calls damaged for each change of the engine's objects by somebody
	// else, soon after it, until ctx ends; then it returns nil. When it cannot know
	// what happened, it calls damaged with the zero Damage. It runs beside the
	// engine's other methods, and damaged may be called from within them. It returns
	// errors.ErrUnsupported if no part of the engine can watch.
	Watch(ctx context.Context, damaged func(Damage)) error
}

// Damage is a change of an engine's objects by somebody else.
type Damage struct {
	// Object is what was changed, e.g. "chain pick in table ip kube-proxy".
	Object string
	// By is who did it, e.g. "nft (process 4711)"; empty if that is not known.
	By string
	// Service is the one service port that is not as it was programmed, if that is known:
	// it is programmed again, with the Updates as they come, and nothing else. The zero
	// name asks for a full Update.
	Service changetracker.ServicePortName
}

// String is "object, changed by whom".
func (d Damage) String() string {
	if d.By == "" {
		return d.Object
	}
	return d.Object + ", changed by " + d.By
}

// ApplyReport counts the kernel writes of one Apply.
type ApplyReport struct {
	// Writes is the number of kernel objects created, changed or deleted: set
	// elements, rules, chains, virtual servers.
	Writes int
	// Transactions is the number of atomic steps they were written in.
	Transactions int
	// Bytes is what was sent to the kernel, where that means something.
	Bytes int
	// Kernel is how long the engine waited for the kernel.
	Kernel time.Duration
	// Rules counts the rules of the instance by table, and RulesWritten those of them that
	// were written, for engines whose work is rules; nil for others.
	Rules, RulesWritten map[string]int
}
