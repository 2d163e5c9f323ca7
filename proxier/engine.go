package proxier

import (
	"context"
	"io"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// Engine is the data plane of one IP family. Calls of Apply, Cleanup and Close never overlap.
//
// An engine may have further abilities, each with its own methods:
//   - Watch, Plan, Dump, Counts and Verify: see Watcher, Planner, Dumper, Counter and Verifier.
//   - OwnsNames() bool: true means that it writes kernel objects with the instance's Names,
//     which exist once per network namespace. From its first sync until Run ends, its
//     Proxier keeps other Proxiers with one of these Names from writing in the same IP
//     family, in this process and in others: see ErrInUse.
//   - Descriptors() connection.Descriptors: how many file descriptors of this process its
//     clients use; Limit is 0 if they are not counted. It may be called at any time, and
//     must return soon.
//   - Conditions() []Condition: faults of the engine that last and fail no sync. Their Family is
//     set for them. It may be called at any time, and must return soon.
//
// An engine that wraps another one and passes its Updates on unchanged has a method
// Unwrap() Engine, so that As finds these methods. An engine that consists of several, like
// that of package hybrid, has the methods itself and calls those of its members.
type Engine interface {
	// Apply brings the data plane to the Update. It is idempotent: a second call with the
	// same Update writes nothing. An error means that no part of the Update counts as
	// programmed; the next Update is full. Failures of single service ports are reported in
	// Result.Failed.
	Apply(ctx context.Context, update desired.Update) (Result, error)
	// Cleanup removes every kernel object of this instance, and nothing else.
	// Missing objects are not an error.
	Cleanup(ctx context.Context) error
	// Close releases the resources that the engine holds in this process. Kernel objects
	// stay. A later Apply, which is full, starts again.
	Close() error
	// Traits describe how the engine treats packets in ways that differ between engines: for
	// a service port, or with nil for addresses without one. They depend on the engine's
	// configuration only. It may be called at any time.
	Traits(s *desired.Service) desired.Traits
}

// Result is the result of one Apply. After an error only its Report counts.
type Result struct {
	// Failed are the service ports that are not programmed as the Update wants them, in any
	// order. They are retried. It may list service ports that the Update does not.
	Failed []*ServiceError
	// Report counts what was written.
	Report ApplyReport
	// FlowEnds is for engines that terminate connections themselves: in connection
	// tracking, the flows of a service port then end at sockets of the engine. It lists
	// these sockets, sorted, by service port of the Update. Flows of service ports that it
	// does not list end at their endpoints.
	FlowEnds map[changetracker.ServicePortName][]netip.AddrPort
	// Left are frontends that a full Update removed from the kernel, because no service port has
	// them, in any order: those that an earlier process programmed. Its stale flows go on.
	Left []desired.Key
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

// Planner is an Engine that can print what Apply would program from scratch. It
// needs no privilege and does not access the kernel.
type Planner interface {
	// Plan returns an error that is errors.ErrUnsupported if no part of the engine can plan.
	Plan(update desired.Update) (text string, err error)
}

// Dumper is an Engine that can print the kernel objects that it has programmed.
type Dumper interface {
	// Dump returns an error that is errors.ErrUnsupported if no part of the engine can dump.
	Dump(ctx context.Context, w io.Writer) error
}

// Watcher is an Engine that notices when another program changes its objects.
type Watcher interface {
	// Watch calls damaged for each change of the engine's objects by another program, soon
	// after it, until ctx ends; then it returns nil. If it cannot know what was changed, for
	// example after a lost notification, it calls damaged with the zero Damage. It runs
	// concurrently with the engine's other methods, and damaged may be called from within
	// them. It returns errors.ErrUnsupported if no part of the engine can watch.
	Watch(ctx context.Context, damaged func(Damage)) error
}

// owner and descriptorHolder are the abilities without an exported interface: see Engine.
type (
	owner            interface{ OwnsNames() bool }
	descriptorHolder interface{ Descriptors() connection.Descriptors }
	conditional      interface{ Conditions() []Condition }
)

// Damage is a change of an engine's objects by another program.
type Damage struct {
	// Object is the changed object, e.g. "chain pick in table ip kube-proxy".
	Object string
	// By is the program that changed it, e.g. "nft (process 4711)"; empty if unknown.
	By string
	// Service is the only affected service port, if known: it is programmed again by a
	// partial sync. The zero name requests a full sync.
	Service changetracker.ServicePortName
}

// String returns "object, changed by program".
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
	// Bytes is the number of bytes sent to the kernel, for engines that count them.
	Bytes int
	// Kernel is how long the engine waited for the kernel.
	Kernel time.Duration
	// Rules counts the rules of the instance by table, and RulesWritten those that
	// were written. Both are nil for engines that do not program rules.
	Rules, RulesWritten map[string]int
}
