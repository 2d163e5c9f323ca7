package proxier

import (
	"context"
	"net/netip"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier/connection"
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
	Conntrack *Conntrack
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

// without is Status.Without.
func (d *Deps) without(c *Config) (missing []string) {
	if d.Conntrack == nil {
		missing = append(missing, "Conntrack")
	}
	if c.CountTraffic && (d.Conntrack == nil || d.Conntrack.RunTraffic == nil) {
		missing = append(missing, "RunTraffic")
	}
	if d.Health == nil {
		missing = append(missing, "Health")
	}
	return missing
}

// Observer receives a report of every sync, on the syncing goroutine. It must be
// quick, and safe for concurrent calls of both families.
type Observer interface {
	ObserveSync(report SyncReport)
}

// Conntrack are functions of connection tracking. Those in groups may be nil: then it cannot do that, and
// Status says so if a Service or the Config asks for it. A wrapper copies the struct, and replaces what it wants.
type Conntrack struct {
	// Tracks reports whether stale flows of a protocol are deleted. It must always
	// return the same answer. FlowCheck.Untranslated has TCP, too, if it is not tracked.
	Tracks func(protocol desired.Protocol) bool
	// Clean deletes the stale flows of some frontends, conntrack entries to an endpoint that is gone, and
	// returns their number: the kernel would keep sending a client's datagrams there until the client
	// pauses. Calls for both families may overlap. After an error it is called again with everything
	// that is still pending.
	Clean func(ctx context.Context, family v1.IPFamily, check desired.FlowCheck) (deleted int, err error)

	// RunEnding ends TCP connections to endpoints that are gone for good, of service ports with
	// EndConnections, until ctx ends: both ends get a RST. Clean finds them, by FlowCheck.End, so that no
	// sync waits for that. Then RunEnding removes its kernel objects, unless connections are left that must
	// end, and returns after all of its goroutines have ended. It touches no kernel object of a family before
	// the first Clean of it, which always comes, and then goes on with what an earlier process has left.
	// After failures it tries again.
	RunEnding func(ctx context.Context, log *zap.Logger) error
	// EndingStatus returns how many connections must end, but their clients have not received a RST yet,
	// how many clients have, since the start, and ConditionConnections while it cannot end connections;
	// otherwise the zero Condition.
	EndingStatus func(family v1.IPFamily) (open, ended int, cannot Condition)
	// CleanupEnding removes what an earlier process has left in the kernel.
	CleanupEnding func(ctx context.Context, family v1.IPFamily) error

	// RunTraffic counts packets and bytes until ctx ends, if Config.CountTraffic is set. It calls begun
	// when counting has begun, or cannot: no sync happens before. After failures it tries again.
	RunTraffic func(ctx context.Context, log *zap.Logger, begun func()) error
	// FollowTraffic is called after each Apply that succeeded: flows are counted for the service
	// ports that there are now, except where selected returns false: their engine counts. check
	// says where node ports are accepted, and has no frontends.
	FollowTraffic func(family v1.IPFamily, outcomes []desired.Applied, check desired.FlowCheck, selected func(*desired.Service) bool)
	// AddTraffic returns counts with the traffic of an IP family.
	AddTraffic func(ctx context.Context, family v1.IPFamily, counts connection.Counts) (connection.Counts, error)
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
