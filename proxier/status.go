package proxier

import (
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Status is a snapshot of the proxy: what it has programmed, and what is wrong.
type Status struct {
	// Synced means that a full sync of every family has succeeded.
	Synced bool
	// Families has one entry for each family that is served.
	Families map[v1.IPFamily]FamilyStatus
	// Problems are the values of API objects that are currently ignored, sorted by object
	// and field.
	Problems []changetracker.Problem
	// Conditions are other states that need an operator, sorted by type and family; empty
	// if there are none.
	Conditions []Condition
	// Node is the last node that was passed to OnNodeChange, or Config.Node.
	Node changetracker.Node
	// Waiting lists the inputs that the first sync still waits for; empty if it does not.
	// Until then the kernel keeps the objects of the previous proxy.
	Waiting []changetracker.Input
	// LastQueued is when a sync was requested last; zero before the first request.
	LastQueued time.Time
	// Without lists Deps that are nil although packets may need them: "Conntrack" (UDP
	// clients keep an endpoint that is gone), "Health" (health check node ports are not
	// served), "RunTraffic" of Conntrack (Config.CountTraffic counts only what engines terminate).
	Without []string
	// Tracked counts the tracked API objects.
	Tracked changetracker.EventCounts
}

// The types of Conditions.
const (
	// ConditionAnnouncements means that the Announcer failed to announce or withdraw VIPs. It is
	// called again.
	ConditionAnnouncements = "Announcements"
	// ConditionConnections means that TCP connections to endpoints that are gone cannot be ended,
	// although a Service asks for that.
	ConditionConnections = "Connections"
	// ConditionContested means that another program keeps changing our kernel objects.
	// Repairs have pauses, so that they take a tenth of the time; of at most a minute.
	ConditionContested = "Contested"
	// ConditionDescriptors means that the clients of service ports need more file
	// descriptors than this process may open, so that some are refused or disconnected.
	ConditionDescriptors = "Descriptors"
	// ConditionEnded means that a part of the proxy has ended before its time: it serves no health check
	// node ports, ends no connections or counts no traffic any more, as the message says.
	ConditionEnded = "Ended"
	// ConditionForwarding means that a setting of the node's kernel keeps packets from endpoints, or answers
	// from clients: see Deps.Surroundings.
	ConditionForwarding = "Forwarding"
	// ConditionHealthCheckPort means that the proxy cannot listen on the health check node
	// port of a Service, so that load balancers get no answer.
	ConditionHealthCheckPort = "HealthCheckPort"
	// ConditionInUse means that another process, or another Provider of this one, programs
	// objects with the same Names, so that this one programs nothing: see ErrInUse.
	ConditionInUse = "InUse"
	// ConditionKernelSettings means that a kernel setting could not be applied.
	ConditionKernelSettings = "KernelSettings"
	// ConditionNode means that neither addresses nor pod CIDRs of the node are known, on which the Config
	// depends: node ports at its primary address are not served, or its pods are not recognized.
	ConditionNode = "Node"
	// ConditionSockets means that engine ebpf does not translate sockets, or not those to some
	// service ports, so that the rules do it.
	ConditionSockets = "Sockets"
	// ConditionStaleFlows means that stale flows could not be deleted from connection
	// tracking. They expire when their clients pause.
	ConditionStaleFlows = "StaleFlows"
	// ConditionUnwatched means that only the periodic full sync detects changes of our
	// kernel objects by other programs.
	ConditionUnwatched = "Unwatched"
)

// Condition is a lasting fault that does not fail syncs.
type Condition struct {
	// Type is one of the constants Condition….
	Type string
	// Family is the affected IP family; empty for the proxy as a whole.
	Family v1.IPFamily
	// Since is when it began.
	Since time.Time
	// Message describes the fault, its cause and what to do.
	Message string
}

// FamilyStatus is the part of one IP family.
type FamilyStatus struct {
	// Synced means that a full sync of the family has succeeded.
	Synced bool
	// LastAttempt is when the last sync ended, LastSuccess when the last one that did not fail as a
	// whole did. Service ports in Failed do not count.
	LastAttempt, LastSuccess time.Time
	// LastError is why the last sync failed as a whole, nil if it did not.
	LastError error
	// PendingSince is when the oldest change that no sync has programmed or recorded in Failed
	// arrived; zero if there is none.
	PendingSince time.Time
	// Versions are those up to which every change is programmed, but for the service ports in
	// Failed: see EventHandler.OnVersion. They are empty if nobody calls it, before the first
	// sync, after a sync that failed as a whole, while damage by another program is not
	// repaired, and while stale flows wait for the next part of a large change. They tell nothing about changes of the node.
	Versions changetracker.Versions
	// StaleSince is since when the data plane may be out of date: the start of the first of
	// the latest consecutive failed syncs, the start of the running sync, the arrival of
	// the oldest change that no sync has tried yet, or damage by another program that is not
	// repaired, or that returns after each repair, whichever is oldest. Zero if there is
	// none of these. Service ports in Failed do not count, so that one bad Service does
	// not make the node unhealthy.
	StaleSince time.Time
	// ServicePorts is the number of service ports that are programmed.
	ServicePorts int
	// NoLocalInternal and NoLocalExternal count the service ports whose traffic this node
	// drops: their internal or external traffic policy is Local, and all of their endpoints
	// are on other nodes.
	NoLocalInternal, NoLocalExternal int
	// Damaged counts the detected changes of our kernel objects by other programs.
	// LastDamage is the last of them, at LastDamageTime.
	Damaged        int
	LastDamage     Damage
	LastDamageTime time.Time
	// Repairing means that damage by another program is not repaired yet, or that such damage
	// cannot be excluded yet; it is a reason for empty Versions.
	Repairing bool
	// Descriptors counts the file descriptors that clients use, for engines that report
	// them; see Engine.
	Descriptors connection.Descriptors
	// ConnectionsEnding are the TCP connections to endpoints that are gone for good while the client has
	// not received a RST yet; ConnectionsEnded are the connections with a client that has, since the start.
	ConnectionsEnding, ConnectionsEnded int
	// Failed are the service ports that are not programmed as desired, sorted by name, each
	// with its cause. Each is retried with pauses of its own, unless it is Terminal.
	Failed []*ServiceError
}

// Stage is a part of a sync.
type Stage struct {
	Name     string // one of the constants Stage…
	Started  time.Time
	Duration time.Duration
}

// The stages of a sync, in their order. Stages without work are omitted.
const (
	// StageTracker computes the State and the Delta.
	StageTracker = "tracker"
	// StageResolve computes the desired Services of the Delta.
	StageResolve = "resolve"
	// StagePlan is the engine's work without waiting for the kernel.
	StagePlan = "plan"
	// StageApply is the time that the engine waits for the kernel.
	StageApply = "apply"
	// StageConntrack deletes stale flows.
	StageConntrack = "conntrack"
	// StageHealth updates the health check node ports.
	StageHealth = "health"
)

// MaxFailures is how many service ports a SyncReport lists.
const MaxFailures = 10

// SyncReport describes one sync of one family. A large change may take several: see Abilities.Part.
type SyncReport struct {
	Family v1.IPFamily
	// Full means that the sync compared everything with the kernel, not only what changed.
	Full bool
	// Repair means that the sync repaired objects that another program had changed.
	Repair bool
	// Queued is when the oldest change of this sync arrived; zero for a sync
	// without changes. Started and Duration are those of the sync itself.
	Queued, Started time.Time
	Duration        time.Duration
	// Stages are the parts of the sync, in order of time. The changes waited between Queued
	// and Started.
	Stages []Stage
	// Changes is the number of changed service ports.
	Changes int
	// ServicePorts is the number of service ports that are programmed afterwards.
	ServicePorts int
	// Triggers are the times at which the control plane saw the causes of what this sync has
	// programmed. Those of a failure are in the report of the sync that programs it.
	Triggers []time.Time
	// Apply counts what the engine wrote, if it reports that.
	Apply ApplyReport
	// Failed is the number of service ports that are not programmed as they should be. Failures are
	// the first of those that failed in this sync and not before, or for another reason; at most
	// MaxFailures.
	Failed   int
	Failures []*ServiceError
	// FlowsDeleted is the number of stale flows that were deleted.
	FlowsDeleted int
	// NoLocalInternal and NoLocalExternal are as in FamilyStatus.
	NoLocalInternal, NoLocalExternal int
	// Problems is the number of values of API objects that are ignored, by reason, in all
	// families.
	Problems map[changetracker.Reason]int
	// Err is the failure of the sync as a whole, nil if everything is programmed but for Failed.
	Err error
}
