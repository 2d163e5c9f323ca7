// Package answers declares the JSON that package debughttp writes and package spctl reads. Values of
// enumerations are strings, so that a reader accepts those that a newer proxy has.
package answers

import "time"

// Error is the answer to a request that failed.
type Error struct {
	Error string `json:"error"`
}

// Status is the answer of status.
type Status struct {
	Title   string `json:"title"`
	Version string `json:"version,omitempty"`
	// Answers are the paths of the JSON that the debughttp.Handler has, sorted.
	Answers []string `json:"answers"`
	// Now is the proxy's time, for the computation of ages.
	Now        time.Time   `json:"now"`
	Synced     bool        `json:"synced"`
	Waiting    []string    `json:"waiting,omitempty"`
	Without    []string    `json:"without,omitempty"`
	Node       Node        `json:"node"`
	Families   []Family    `json:"families"`
	Tracked    Tracked     `json:"tracked"`
	Conditions []Condition `json:"conditions"`
	// Problems has at most limit entries; ProblemsTotal counts all.
	Problems      []Problem `json:"problems"`
	ProblemsTotal int       `json:"problemsTotal"`
	LastQueued    time.Time `json:"lastQueued,omitzero"`
}

// Node is the node of the proxy.
type Node struct {
	Name      string   `json:"name"`
	Zone      string   `json:"zone,omitempty"`
	Addresses []string `json:"addresses"`
	PodCIDRs  []string `json:"podCIDRs"`
}

// Tracked counts the tracked API objects.
type Tracked struct {
	ServiceEvents         uint64 `json:"serviceEvents"`
	EndpointSliceEvents   uint64 `json:"endpointSliceEvents"`
	PendingServices       int    `json:"pendingServices"`
	PendingEndpointSlices int    `json:"pendingEndpointSlices"`
}

// Family is the status of an IP family.
type Family struct {
	Family       string    `json:"family"`
	Synced       bool      `json:"synced"`
	LastAttempt  time.Time `json:"lastAttempt,omitzero"`
	LastSuccess  time.Time `json:"lastSuccess,omitzero"`
	LastError    string    `json:"lastError,omitempty"`
	PendingSince time.Time `json:"pendingSince,omitzero"`
	StaleSince   time.Time `json:"staleSince,omitzero"`
	ServicePorts int       `json:"servicePorts"`
	// NoLocalInternal and NoLocalExternal count the service ports whose traffic this node
	// drops.
	NoLocalInternal int       `json:"noLocalEndpointsInternal"`
	NoLocalExternal int       `json:"noLocalEndpointsExternal"`
	Damaged         int       `json:"damaged"`
	LastDamage      *Damage   `json:"lastDamage,omitempty"`
	Failed          []Failure `json:"failed"`
	FailedTotal     int       `json:"failedTotal"`
}

// Damage is a change of the proxy's kernel objects by another program.
type Damage struct {
	Object string    `json:"object,omitempty"`
	By     string    `json:"by,omitempty"`
	Time   time.Time `json:"time,omitzero"`
}

// Failure is a service port that the last sync could not program.
type Failure struct {
	ServicePortName

	Error string `json:"error"`
}

// ServicePortName names a service port in all IP families.
type ServicePortName struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	PortName  string `json:"portName,omitempty"`
	Protocol  string `json:"protocol"`
}

// Condition is a state that needs an operator.
type Condition struct {
	Type    string    `json:"type"`
	Family  string    `json:"family,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	Message string    `json:"message"`
}

// Problem is a value of an API object that is ignored.
type Problem struct {
	Object string `json:"object"`
	Field  string `json:"field"`
	Value  string `json:"value"`
	Reason string `json:"reason"`
}

// Services is the answer of services.
type Services struct {
	// Total is the number of matches, and Offset how many of them precede Services.
	Total  int `json:"total"`
	Offset int `json:"offset"`
	// Counts are the Services in the namespace that match q, by filter, and all of them.
	Counts   map[string]int   `json:"counts"`
	Services []ServiceSummary `json:"services"`
}

// ServiceSummary is a Service in a list.
type ServiceSummary struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Verdict is what becomes of connections to its frontends.
	Verdict      string        `json:"verdict"`
	ServicePorts []ServicePort `json:"servicePorts"`
}

// ServicePort is a service port in one IP family.
type ServicePort struct {
	Family           string   `json:"family"`
	PortName         string   `json:"portName,omitempty"`
	Protocol         string   `json:"protocol"`
	ClusterIP        string   `json:"clusterIP,omitempty"`
	Port             uint16   `json:"port"`
	NodePort         uint16   `json:"nodePort,omitempty"`
	HealthCheckPort  uint16   `json:"healthCheckNodePort,omitempty"`
	ExternalIPs      []string `json:"externalIPs"`
	LoadBalancerVIPs []string `json:"loadBalancerVIPs"`
	InternalPolicy   string   `json:"internalTrafficPolicy"`
	// ExternalPolicy is omitted if the Service has no external frontends.
	ExternalPolicy string `json:"externalTrafficPolicy,omitempty"`
	// ExposeOn selects the nodes that have the external frontends; empty: all.
	ExposeOn        string  `json:"exposeOn,omitempty"`
	AffinitySeconds float64 `json:"sessionAffinitySeconds,omitempty"`
	// Balancing is the load balancing policy; random is omitted.
	Balancing string `json:"loadBalancing,omitempty"`
	// EndpointsUsable counts the endpoints that are ready, or terminating and serving.
	EndpointsUsable int `json:"endpointsUsable"`
	EndpointsAll    int `json:"endpointsAll"`
}

// Service is the answer of service.
type Service struct {
	Namespace    string              `json:"namespace"`
	Name         string              `json:"name"`
	ServicePorts []ServicePortInFull `json:"servicePorts"`
	// UnmatchedSlices serve no port of the Service, mostly because a port's name is misspelt.
	UnmatchedSlices []UnmatchedSlice `json:"unmatchedSlices,omitempty"`
}

// UnmatchedSlice is an EndpointSlice that serves no port of its Service.
type UnmatchedSlice struct {
	Family    string   `json:"family"`
	Name      string   `json:"name"`
	Ports     []string `json:"ports"`
	Endpoints int      `json:"endpoints"`
}

// ServicePortInFull is a service port with its frontends and endpoints.
type ServicePortInFull struct {
	ServicePort

	// Error is why the service port's last sync failed.
	Error     string         `json:"error,omitempty"`
	Frontends []Frontend     `json:"frontends"`
	Endpoints []UsedEndpoint `json:"endpoints"`
}

// Frontend is where a service port takes connections.
type Frontend struct {
	Kind string `json:"kind"`
	// Text is "address:port/PROTOCOL" or "node port N/PROTOCOL".
	Text string `json:"text"`
	// VIP is omitted for a node port.
	VIP          string   `json:"vip,omitempty"`
	Port         uint16   `json:"port"`
	Action       string   `json:"action"`
	Scope        string   `json:"scope"`
	Masquerade   string   `json:"masquerade"`
	ShortCircuit bool     `json:"shortCircuit"`
	Restricted   bool     `json:"restricted"`
	SourceRanges []string `json:"sourceRanges"`
}

// UsedEndpoint is an endpoint from the view of its service port.
type UsedEndpoint struct {
	Endpoint

	// Used means that some frontend may send connections to the endpoint.
	Used bool `json:"used"`
	// Excluded is why none does.
	Excluded string `json:"excluded,omitempty"`
}

// Endpoint is an endpoint from the view of the node.
type Endpoint struct {
	Address string `json:"address"`
	// State is "ready", "terminating" (and serving), "gone" (terminating and not serving),
	// "ejected" (by an Override), "maintenance" or "not ready".
	State       string `json:"state"`
	Ready       bool   `json:"ready"`
	Serving     bool   `json:"serving"`
	Terminating bool   `json:"terminating"`
	Local       bool   `json:"local"`
	// Weight is omitted if it is 1, the default.
	Weight uint16 `json:"weight,omitempty"`
	// Priority is the group of the endpoint; it is omitted if it is 0, the first one.
	Priority  uint8    `json:"priority,omitempty"`
	Node      string   `json:"node,omitempty"`
	Zone      string   `json:"zone,omitempty"`
	NodeHints []string `json:"nodeHints"`
	ZoneHints []string `json:"zoneHints"`
}

// State is the answer of state: everything that is programmed, for comparison.
type State struct {
	Node     string         `json:"node"`
	Services []ServiceState `json:"services"`
}

// ServiceState is a Service in a State.
type ServiceState struct {
	Namespace    string             `json:"namespace"`
	Name         string             `json:"name"`
	ServicePorts []ServicePortState `json:"servicePorts"`
}

// ServicePortState is a service port in a State.
type ServicePortState struct {
	ServicePort

	Endpoints []EndpointState `json:"endpoints"`
}

// EndpointState is what does not depend on the node that is asked.
type EndpointState struct {
	Address string `json:"address"`
	State   string `json:"state"`
	// Weight is omitted if it is 1, the default.
	Weight uint16 `json:"weight,omitempty"`
	// Priority is omitted if it is 0.
	Priority uint8 `json:"priority,omitempty"`
}

// Explanation is the answer of explain.
type Explanation struct {
	Packet  Packet   `json:"packet"`
	Verdict string   `json:"verdict"`
	Reasons []string `json:"reasons"`
	// ServicePort and Frontend are omitted if the packet matches none.
	ServicePort *ServicePortName `json:"servicePort,omitempty"`
	Frontend    *Frontend        `json:"frontend,omitempty"`
	// Scope is omitted if the verdict does not depend on endpoints.
	Scope      string `json:"scope,omitempty"`
	Masquerade bool   `json:"masquerade"`
	// BySocket means that the client's socket is translated when it connects; omitted if rules do it.
	BySocket bool `json:"bySocket,omitempty"`
	// AffinitySeconds is the timeout of session affinity.
	AffinitySeconds float64 `json:"affinitySeconds,omitempty"`
	// Balancing is the load balancing policy; random is omitted.
	Balancing string `json:"loadBalancing,omitempty"`
	// Scheduler is that of IPVS, omitted with other engines.
	Scheduler string              `json:"scheduler,omitempty"`
	Limit     string              `json:"limit,omitempty"` // what bounds the connections of the client
	Endpoints []ExplainedEndpoint `json:"endpoints"`
}

// Packet is the first packet of a connection.
type Packet struct {
	Protocol    string `json:"protocol"`
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Origin      string `json:"origin"`
	Interface   string `json:"interface,omitempty"`
}

// ExplainedEndpoint is an endpoint from the view of one packet.
type ExplainedEndpoint struct {
	Endpoint

	// Excluded is why the packet cannot go to the endpoint; empty if it can.
	Excluded   string `json:"excluded,omitempty"`
	Masquerade bool   `json:"masquerade"`
}

// Trace is the answer of trace.
type Trace struct {
	Packet  Packet      `json:"packet"`
	Steps   []TraceStep `json:"steps"`
	Verdict string      `json:"verdict"`
	By      string      `json:"by"`
	Reasons []string    `json:"reasons"`
	Sent    string      `json:"sent,omitempty"`
	Explain Explanation `json:"explain"`
	Agrees  bool        `json:"agrees"`
}

// TraceStep is a debughttp.TraceStep.
type TraceStep struct {
	Family  string `json:"family"`
	Table   string `json:"table"`
	Chain   string `json:"chain"`
	Hook    string `json:"hook,omitempty"`
	Rule    string `json:"rule,omitempty"`
	Comment string `json:"comment,omitempty"`
	Handle  uint64 `json:"handle"`
	Command string `json:"command,omitempty"`
	Verdict string `json:"verdict"`
	Ours    bool   `json:"ours"`
}

// Syncs is the answer of syncs.
type Syncs struct {
	Syncs []Sync `json:"syncs"`
}

// Sync is one of the last syncs.
type Sync struct {
	Family          string    `json:"family"`
	Started         time.Time `json:"started"`
	DurationSeconds float64   `json:"durationSeconds"`
	// QueuedSeconds is how long the oldest change waited; omitted without changes.
	QueuedSeconds float64 `json:"queuedSeconds,omitempty"`
	Full          bool    `json:"full"`
	Repair        bool    `json:"repair"`
	// Changes and ServicePorts count service ports.
	Changes      int `json:"changes"`
	ServicePorts int `json:"servicePorts"`
	Failed       int `json:"failed"`
	Writes       int `json:"writes"`
	Transactions int `json:"transactions"`
	Bytes        int `json:"bytes"`
	// KernelSeconds is how long the engine waited for the kernel.
	KernelSeconds float64 `json:"kernelSeconds"`
	FlowsDeleted  int     `json:"flowsDeleted"`
	Stages        []Stage `json:"stages"`
	Error         string  `json:"error,omitempty"`
}

// Stage is a part of a sync.
type Stage struct {
	Name string `json:"name"`
	// AfterSeconds is the time from the start of the sync to the start of the stage.
	AfterSeconds    float64 `json:"afterSeconds"`
	DurationSeconds float64 `json:"durationSeconds"`
}

// Counts is the answer of counts.
type Counts struct {
	// Since is omitted before the first sync.
	Since time.Time `json:"since,omitzero"`
	// Traffic says that traffic is counted, and TrafficProblem why not, if that was asked for, or why some is missing.
	Traffic        bool   `json:"traffic,omitempty"`
	TrafficProblem string `json:"trafficProblem,omitempty"`
	TrafficLosses  uint64 `json:"trafficLosses,omitempty"`
	// Total is the number of service ports that match.
	Total        int           `json:"total"`
	ServicePorts []CountedPort `json:"servicePorts"`
}

// CountedPort is a service port with what was counted.
type CountedPort struct {
	ServicePortName

	Traffic

	Refused   uint64            `json:"refused,omitempty"` // connections above the client limit
	Family    string            `json:"family"`
	Endpoints []CountedEndpoint `json:"endpoints"`
}

// CountedEndpoint is an endpoint with what was counted.
type CountedEndpoint struct {
	Traffic

	Address string `json:"address"`
}

// Traffic are the connections, and what went to endpoints (in) and came from them (out). What is not
// counted is omitted.
type Traffic struct {
	Connections *uint64 `json:"connections,omitempty"`

	PacketsIn  *uint64 `json:"packetsIn,omitempty"`
	PacketsOut *uint64 `json:"packetsOut,omitempty"`
	BytesIn    *uint64 `json:"bytesIn,omitempty"`
	BytesOut   *uint64 `json:"bytesOut,omitempty"`
}

// Verification is the answer of verify.
type Verification struct {
	// Agrees is true if every IP family was compared and none has a difference.
	Agrees   bool             `json:"agrees"`
	Families []VerifiedFamily `json:"families"`
}

// VerifiedFamily is an IP family that was compared with the kernel.
type VerifiedFamily struct {
	Family  string `json:"family"`
	Checked int    `json:"checked"`
	// Total is the number of differences, of which Differences are the first.
	Total       int          `json:"total"`
	Differences []Difference `json:"differences"`
	// Error is why the family was not compared.
	Error string `json:"error,omitempty"`
}

// Difference is an object that is not in the kernel as it should be.
type Difference struct {
	Object  string `json:"object"`
	Problem string `json:"problem"`
	Want    string `json:"want,omitempty"`
	Have    string `json:"have,omitempty"`
	// Service is "namespace/name:port/protocol".
	Service string `json:"service,omitempty"`
}

// Rules is the answer of rules.
type Rules struct {
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	Families  []FamilyRules `json:"families"`
}

// FamilyRules are the rules of one IP family.
type FamilyRules struct {
	Family string `json:"family"`
	Text   string `json:"text"`
}

// Change is the part of the answer of programmed that is about a change of a Service.
type Change struct {
	// Programmed means that the query names a change and that the node has it; otherwise Missing
	// says why not.
	Programmed bool   `json:"programmed"`
	Missing    string `json:"missing,omitempty"`
}

// Event is one line of a watch: a change of a programmed service port.
type Event struct {
	Time time.Time `json:"time"`
	Type string    `json:"type"`
	// The rest is omitted for the type watching.
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	// ServicePort is the service port after the change, or before it was removed.
	ServicePort *ServicePort `json:"servicePort,omitempty"`
	// EndpointsAdded have a new address or another state; EndpointsRemoved are addresses.
	EndpointsAdded   []Endpoint `json:"endpointsAdded,omitempty"`
	EndpointsRemoved []string   `json:"endpointsRemoved,omitempty"`
}
