package proxier

import (
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// Status is a snapshot of what the proxy has done and of what is wrong.
type Status struct {
	// Synced says that every family has been programmed in full at least once.
	Synced bool
	// Families has one entry for each family that is served.
	Families map[v1.IPFamily]FamilyStatus
	// Problems are the values of API objects that are set aside at the moment,
	// sorted by object and field.
	Problems []changetracker.Problem
	// Conditions are what an operator should look at, beside failures: sorted by
	// type and family, empty when all is well.
	Conditions []Condition
	// Node is the node as the proxy knows it.
	Node changetracker.Node
	// Waiting lists what must be known before the first sync and is not; empty when all
	// is. Until then the kernel has what a proxy before this one has left.
	Waiting []changetracker.Input
	// LastQueued is when a sync was asked for last; zero before the first time.
	LastQueued time.Time
	// Without names the Deps that are nil and that packets may miss: "Conntrack" (a UDP
	// client stays with an endpoint that is gone), "Health" (no health check node ports
	// are served).
	Without []string
	// Tracked counts what came from the control plane.
	Tracked changetracker.Counts
}

// The types of Conditions.
const (
	// ConditionContested says that somebody keeps changing our kernel objects.
	// They are repaired less and less often, at least once a minute.
	ConditionContested = "Contested"
	// ConditionDescriptors says that the clients of service ports need more descriptors
	// than this process may have, so that some are refused or ended.
	ConditionDescriptors = "Descriptors"
	// ConditionHealthCheckPort says that load balancers get no answer at the health
	// check node port of a Service, because it cannot be listened on.
	ConditionHealthCheckPort = "HealthCheckPort"
	// ConditionInUse says that another process, or another Provider of this one, programs
	// the same objects, so that this one does not: see ErrInUse.
	ConditionInUse = "InUse"
	// ConditionKernelSettings says that a kernel setting is not as it was asked for.
	ConditionKernelSettings = "KernelSettings"
	// ConditionStaleFlows says that connection tracking still holds flows that may be
	// stale, because it cannot be cleaned. They end by themselves, when their clients
	// pause.
	ConditionStaleFlows = "StaleFlows"
	// ConditionUnwatched says that changes by others are noticed by the periodic
	// full sync only.
	ConditionUnwatched = "Unwatched"
)

// Condition is a lasting state of the proxy that is not as it should be.
type Condition struct {
	// Type is one of the constants Condition….
	Type string
	// Family is the IP family that it is about; empty for the proxy as a whole.
	Family v1.IPFamily
	// Since is when it began.
	Since time.Time
	// Message says what is wrong and who may be the cause.
	Message string
}

// FamilyStatus is the part of one IP family.
type FamilyStatus struct {
	// Synced says that the family has been programmed in full at least once.
	Synced bool
	// LastAttempt and LastSuccess are when the last sync, and the last sync
	// without any error, ended.
	LastAttempt, LastSuccess time.Time
	// LastError is the error of the last sync, nil if it succeeded. It holds those
	// ServiceErrors of Failed that this sync came to.
	LastError error
	// PendingSince is when the oldest change arrived that is not yet programmed;
	// zero when there is none.
	PendingSince time.Time
	// StaleSince is since when the data plane may lag behind: when the oldest of these
	// began that there are: a row of failed syncs, a sync under way, the wait of a
	// change that no sync has tried. Zero when there is nothing. What is in Failed
	// does not count: one bad Service makes no node unhealthy.
	StaleSince time.Time
	// ServicePorts is the number of service ports that are programmed.
	ServicePorts int
	// NoLocalInternal and NoLocalExternal count the service ports that this node drops
	// traffic of: that traffic policy is Local, and all endpoints are on other nodes.
	NoLocalInternal, NoLocalExternal int
	// Damaged counts the changes of our kernel objects by others that were noticed;
	// LastDamage is the last of them and LastDamageTime when that was.
	Damaged        int
	LastDamage     Damage
	LastDamageTime time.Time
	// Descriptors are those that clients hold, for engines that tell; see Engine.
	Descriptors connection.Descriptors
	// Failed are the service ports that could not be programmed as they should be,
	// sorted by name, each with its reason. They are retried.
	Failed []*ServiceError
}

// Stage is a part of a sync.
type Stage struct {
	Name     string // one of the constants Stage…
	Started  time.Time
	Duration time.Duration
}

// The stages of a sync, in their order. One that there was nothing to do in is
// left out.
const (
	// StageTracker makes the State and the Delta of what has arrived.
	StageTracker = "tracker"
	// StageResolve decides what the service ports of the Delta mean.
	StageResolve = "resolve"
	// StagePlan is what the engine does apart from waiting for the kernel.
	StagePlan = "plan"
	// StageApply is the engine's waiting for the kernel.
	StageApply = "apply"
	// StageConntrack forgets stale flows.
	StageConntrack = "conntrack"
	// StageHealth tells the health check node ports.
	StageHealth = "health"
)

// SyncReport tells an Observer about one sync of one family.
type SyncReport struct {
	Family v1.IPFamily
	// Full says that everything was checked, not only what changed.
	Full bool
	// Repair says that this sync mended what somebody else had changed.
	Repair bool
	// Queued is when the oldest change of this sync arrived; zero for a sync
	// without changes. Started and Duration time the sync itself.
	Queued, Started time.Time
	Duration        time.Duration
	// Stages are the parts of the sync, in order of time. Between Queued and Started
	// the changes waited.
	Stages []Stage
	// Changes is the number of service ports that differed.
	Changes int
	// ServicePorts is the number of service ports that are programmed afterwards.
	ServicePorts int
	// Triggers are when the control plane saw the causes of what this sync
	// programmed; empty when it failed, and then the next report has them.
	Triggers []time.Time
	// Apply is what the engine wrote, if it can tell.
	Apply ApplyReport
	// Failed is the number of service ports that could not be programmed.
	Failed int
	// FlowsDeleted is the number of stale flows that were forgotten.
	FlowsDeleted int
	// NoLocalInternal and NoLocalExternal are as in FamilyStatus.
	NoLocalInternal, NoLocalExternal int
	// Problems is the number of values of API objects that are set aside, by
	// reason, over all families.
	Problems map[changetracker.Reason]int
	// Err is nil when everything is programmed.
	Err error
}
