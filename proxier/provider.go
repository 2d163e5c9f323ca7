package proxier

import (
	"context"
	"io"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Provider is a Service proxy for one node, as an embedding program sees it,
// whatever engine it has. All methods may be called from several goroutines at
// once. The On… methods only record the event and ask for a sync: they never
// touch the kernel, so an informer's goroutine may call them.
//
// Nothing is written to the kernel before both OnServiceSynced and
// OnEndpointSlicesSynced were called.
type Provider interface {
	OnServiceAdd(service *v1.Service)
	OnServiceUpdate(oldService, service *v1.Service)
	OnServiceDelete(service *v1.Service)
	// OnServiceSynced says that every Service that exists has been added.
	OnServiceSynced()
	OnEndpointSliceAdd(slice *discovery.EndpointSlice)
	OnEndpointSliceUpdate(oldSlice, slice *discovery.EndpointSlice)
	OnEndpointSliceDelete(slice *discovery.EndpointSlice)
	// OnEndpointSlicesSynced says that every EndpointSlice that exists has been
	// added.
	OnEndpointSlicesSynced()
	// OnNodeChange replaces what is known about the node; a change leads to a full
	// sync.
	OnNodeChange(node changetracker.Node)
	// OnServiceCIDRsChanged replaces the ranges that ClusterIPs come from.
	OnServiceCIDRsChanged(cidrs []netip.Prefix)
	// Run syncs until ctx ends and returns nil after every goroutine of the
	// Provider has ended. The data plane stays as it is. Run may be called once.
	Run(ctx context.Context) error
	// Trigger asks for a sync soon, within the rate limit. It is harmless before,
	// during and after Run.
	Trigger()
	// Sync waits for a sync that starts after the call, and returns its error. Run
	// must be running, or be called soon. Before both were synced it waits for that
	// too: when it returns nil, what was known at the call is in the data plane.
	Sync(ctx context.Context) error
	// Cleanup removes every kernel object of this instance, and nothing else. It
	// does not need Run, and must not be called while Run runs. While another process
	// runs with one of its Names, it does nothing, with ErrInUse.
	Cleanup(ctx context.Context) error
	Status() Status
}

// Engine is one IP family's data plane. Calls never overlap.
type Engine interface {
	// Apply brings the data plane to the Update. It is idempotent: applying the
	// same Update again writes nothing. A *ServiceError, alone or joined with
	// others, says that only the service ports it names were left as they were;
	// after any other error the next Update is full.
	Apply(ctx context.Context, update desired.Update) error
	// Cleanup removes every kernel object of this instance, and nothing else.
	// Objects that are not there are no error.
	Cleanup(ctx context.Context) error
}

// Planner is an Engine that can tell what Apply would program from scratch. It
// needs no privilege and touches no kernel.
type Planner interface {
	Plan(update desired.Update) (text string, err error)
}

// Dumper is an Engine that can print what the kernel holds for it.
type Dumper interface {
	Dump(ctx context.Context, w io.Writer) error
}

// Watcher is an Engine that notices when somebody else changes its objects.
type Watcher interface {
	// Watch calls damaged for each change of the engine's objects by somebody
	// else, soon after it, until ctx ends; then it returns nil. When it cannot know
	// what happened, it calls damaged with the zero Damage. It runs beside the
	// engine's other methods, and damaged may be called from within them.
	Watch(ctx context.Context, damaged func(Damage)) error
}

// Damage is a change of an engine's objects by somebody else.
type Damage struct {
	// Object is what was changed, e.g. "chain pick in table ip kube-proxy".
	Object string
	// By is who did it, e.g. "nft (process 4711)"; empty if that is not known.
	By string
}

// String is "object, changed by whom".
func (d Damage) String() string {
	if d.By == "" {
		return d.Object
	}
	return d.Object + ", changed by " + d.By
}

// Characteristic is an Engine that differs from the nftables engine in what packets
// can see.
type Characteristic interface {
	Traits() desired.Traits
}

// Relay is an Engine that takes part in connections itself: as connection tracking
// sees it, flows of its service ports end at the engine's sockets.
type Relay interface {
	// FlowEnds returns where flows of a service port may lead to, sorted, given its
	// endpoints that serve. It is called after Apply, between calls of that.
	FlowEnds(name changetracker.ServicePortName, servers []netip.AddrPort) []netip.AddrPort
}

// Reporter is an Engine that can tell what its last Apply did.
type Reporter interface {
	LastApply() ApplyReport
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
	// Tables are the rules of each table, for engines that have rules; nil for others.
	Tables map[string]TableReport
}

// TableReport counts the rules of one table.
type TableReport struct {
	// Rules is the number of rules that the instance has, Written how many of them
	// were written by the last Apply.
	Rules, Written int
}
