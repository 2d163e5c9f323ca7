package proxier

import (
	"context"
	"io"
	"net/netip"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Engine is the data plane of one IP family. Calls of Apply, Cleanup and Close never overlap.
//
// A wrapper embeds an Engine, and replaces what it wants: methods, and functions of Abilities.
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
	// configuration only. The service port may have only some of its frontends; then the answer is about these.
	// It may be called at any time.
	Traits(s *desired.Service) desired.Traits
	// Abilities are what the engine can do beyond that. They are always the same.
	Abilities() Abilities
}

// Abilities are functions of an Engine, and how to use it. A nil function means that the engine cannot do it.
type Abilities struct {
	// OwnsNames says that the engine writes kernel objects with the instance's Names, which exist
	// once per network namespace. From its first sync until Run ends, its Proxier keeps other
	// Proxiers with one of these Names from writing in the same IP family, in this process and in
	// others: see ErrInUse.
	OwnsNames bool
	// Part is how many service ports an Update that is not full should have, about, so that other changes need
	// not wait for a large one; 0 is any number. It is for engines for which an Update costs what it changes.
	Part int
	// Watch calls damaged for each change of the engine's objects by another program, soon
	// after it, until ctx ends; then it returns nil. If it cannot know what was changed, for
	// example after a lost notification, it calls damaged with the zero Damage. It runs
	// concurrently with all others, and damaged may be called from within them. It returns
	// errors.ErrUnsupported if the kernel lets it not watch.
	Watch func(ctx context.Context, damaged func(Damage)) error
	// Plan prints what Apply would program from scratch. It needs no privilege, and does not access
	// the kernel. It runs concurrently with all others.
	Plan func(update desired.Update) (text string, err error)
	// Dump prints the kernel objects that the engine has programmed.
	Dump func(ctx context.Context, w io.Writer) error
	// Counts returns the numbers of connections, sorted by name and by endpoint, as Config.CountConnections
	// and, of connections that the engine terminates, Config.CountTraffic ask for. It runs concurrently
	// with all others. It returns an error that is errors.ErrUnsupported if nothing is counted.
	Counts func(ctx context.Context) (connection.Counts, error)
	// Verify reads the engine's objects from the kernel, and compares them with what Apply
	// would program from scratch for the Update, which is full. It writes nothing, and does
	// not trust what the engine remembers of earlier Updates. What is left to choice is no
	// difference, such as the order of endpoints or of numbers, and neither is what packets
	// write. Calls never overlap with Apply, Cleanup or Close, which wait for it to return: soon
	// after ctx ends.
	Verify func(ctx context.Context, update desired.Update) (Verification, error)
	// Lingers returns why clients may still send new datagrams or connections to an endpoint that no frontend
	// has any more, until the engine has done what follows Apply; empty if they do not. Port 0 stands for all
	// ports. It may be called at any time, and must return soon.
	Lingers func(endpoint netip.AddrPort) (why string)
	// Descriptors are how many file descriptors of this process its clients use; Limit is 0 if they
	// are not counted. It may be called at any time, and must return soon.
	Descriptors func() connection.Descriptors
	// Conditions are faults of the engine that last and fail no sync. Their Family is set for them. It
	// may be called at any time, and must return soon.
	Conditions func() []Condition
}

// Result is the result of one Apply. After an error only its Report counts.
type Result struct {
	// Failed are the service ports that are not programmed as the Update wants them, in any
	// order. They are retried. It may list service ports that the Update does not.
	Failed []*ServiceError
	// Limited are service ports that are programmed, but not in full, in any order: the engine has no
	// room for all of their endpoints, for example. They are in Status.Problems, and are tried again
	// as those in Failed are.
	Limited []*ServiceError
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
