package proxier

import (
	"context"
	"net/netip"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Deps are behaviours that the embedding program may inject; nil means none.
type Deps struct {
	// Logger receives what an operator should know.
	Logger *zap.Logger
	// Observer is called after every sync.
	Observer Observer
	// Conntrack deletes stale flows. The constructors of the engines, such as
	// nftables.New, set it if it is nil, and so does nodedeps.Complete. New of this package
	// runs without it; Status.Without then lists it.
	Conntrack Conntrack
	// Health answers at the health check node ports of Services. If it is nil, the same
	// holds as for Conntrack.
	Health Health
	// Announcer advertises the VIPs that this node serves.
	Announcer Announcer
	// Settings are kernel settings to apply when Run begins.
	Settings Settings
	// Surroundings, if not nil, finds what keeps packets from endpoints although all rules are right, for
	// example nodedeps.Surroundings. Run asks when it begins and then every half minute, with the
	// node as it is known. What it finds is in Status, and in the log once.
	Surroundings func(ctx context.Context, node changetracker.Node) []Condition
	// Wrap replaces the engine of each IP family by one that wraps it, for example by
	// localhost.Wrap of package userspace/localhost. New calls it.
	Wrap func(family v1.IPFamily, engine Engine) (Engine, error)
	// LocalAddresses returns the addresses of the node's interfaces, in the network
	// namespace that is programmed. Only Explain calls it. If it is nil, Explain uses the
	// addresses in Config.Node.
	LocalAddresses func(context.Context) ([]netip.Addr, error)
}

// Observer receives a report of every sync, on the syncing goroutine. It must be
// quick, and safe for concurrent calls of both families.
type Observer interface {
	ObserveSync(report SyncReport)
}

// Conntrack deletes stale flows: conntrack entries to an endpoint that is gone. The kernel
// would keep sending a client's datagrams there until the client pauses.
type Conntrack interface {
	// Tracks reports whether stale flows of a protocol are deleted. It must always
	// return the same answer. FlowCheck.Untranslated has TCP, too, if it is not tracked.
	Tracks(protocol desired.Protocol) bool
	// Clean deletes the stale flows of some frontends, and returns their number. Calls
	// for both families may overlap. After an error it is called again with everything
	// that is still pending.
	Clean(ctx context.Context, family v1.IPFamily, check desired.FlowCheck) (deleted int, err error)
}

// ConnectionEnder is a Conntrack that also ends TCP connections to endpoints that are gone for
// good, of service ports with EndConnections: both ends get a RST. New calls it if
// Deps.Conntrack implements it.
//
// Clean finds the connections, by FlowCheck.End, and RunEnding ends them, so that no sync
// waits for that.
type ConnectionEnder interface {
	Conntrack
	// RunEnding ends connections until ctx ends. Then it removes its kernel objects, and
	// returns after all of its goroutines have ended. It touches no kernel object of a family
	// before the first Clean of it, which always comes, and then removes what an earlier
	// process has left. After failures it tries again.
	RunEnding(ctx context.Context, log *zap.Logger) error
	// EndingStatus returns the part of FamilyStatus, and ConditionConnections while it cannot
	// end connections; otherwise the zero Condition.
	EndingStatus(family v1.IPFamily) (EndingStatus, Condition)
	// CleanupEnding removes what an earlier process has left in the kernel.
	CleanupEnding(ctx context.Context, family v1.IPFamily) error
}

// TrafficCounter is a Conntrack that also counts packets and bytes. New calls it if
// Config.CountTraffic is set and Deps.Conntrack implements it.
type TrafficCounter interface {
	Conntrack
	// RunTraffic counts until ctx ends. It calls begun when counting has begun, or cannot: no
	// sync happens before. After failures it tries again.
	RunTraffic(ctx context.Context, log *zap.Logger, begun func()) error
	// FollowTraffic is called after each Apply that succeeded: flows are those of the service ports
	// that there are now, except those that selected does not select: their engine counts. check
	// says where node ports are accepted, and has no frontends.
	FollowTraffic(family v1.IPFamily, outcomes []desired.Outcome, check desired.FlowCheck, selected func(*desired.Service) bool)
	// AddTraffic returns counts with the traffic of an IP family.
	AddTraffic(ctx context.Context, family v1.IPFamily, counts Counts) (Counts, error)
}

// EndingStatus counts the TCP connections that end because their endpoint is gone for good.
type EndingStatus struct {
	// Open are those that must end, but whose client has not received a RST yet.
	Open int
	// Ended are those whose client has, since the start.
	Ended int
}

// Settings are kernel settings that a proxy needs beside what its engine programs,
// such as the limits of connection tracking. Calls never overlap.
type Settings interface {
	// Apply writes the settings to the kernel. It returns those that it could not write, as
	// conditions of type ConditionKernelSettings. Run calls it first, and again
	// while it returns conditions, after pauses of a second to half a minute: the kernel module of
	// a setting may have been loaded in the meantime, or a file may be writable again.
	Apply(ctx context.Context) []Condition
	// Restore undoes what Apply has changed, unless it was changed again since. Cleanup
	// calls it.
	Restore(ctx context.Context) error
}

// NoHealth is a Health that listens nowhere, for programs that do not want the
// constructors of the engines to set one.
func NoHealth() Health { return noHealth{} }

type noHealth struct{}

func (noHealth) Update(v1.IPFamily, HealthUpdate) {}
func (noHealth) Conditions() []Condition          { return nil }
func (noHealth) Run(ctx context.Context, _ func() Status) error {
	<-ctx.Done()
	return nil
}
