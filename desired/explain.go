package desired

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Explanation is what happens to a packet, and why.
type Explanation struct {
	Packet  Packet  `json:"packet"`
	Verdict Verdict `json:"verdict"`
	// Reasons are the decisions in their order, as text for people.
	Reasons []string `json:"reasons"`
	// Service is the service port that gets the packet; nil if none does.
	Service *changetracker.ServicePortName `json:"service,omitempty"`
	// Frontend is the frontend that the packet is sent to; nil if Service is.
	Frontend *Frontend `json:"frontend,omitempty"`
	// Scope is the set of endpoints that the packet may go to, short-circuiting included; 0 if
	// the packet is dropped earlier.
	Scope Scope `json:"scope,omitempty"`
	// Masquerade reports whether the packet's source is replaced, whatever the endpoint.
	Masquerade bool `json:"masquerade"`
	// Affinity is how long the client stays with its endpoint; 0 means that each connection may
	// go to any of them.
	Affinity time.Duration `json:"affinity,omitempty"`
	// Balancing is how an endpoint is chosen for a connection, by the weights of the endpoints.
	Balancing changetracker.Balancing `json:"balancing,omitempty"`
	// Scheduler is the name of the scheduler of IPVS that chooses it; empty in other engines.
	// Balancing is the policy that is most like it.
	Scheduler string `json:"scheduler,omitempty"`
	// Limit is what bounds the connections of the client, in the text of changetracker.ClientLimit; empty if nothing does. The
	// Verdict is that of a connection within it.
	Limit string `json:"limit,omitempty"`
	// BySocket means that the client's socket is translated when it connects, so that the packet
	// leaves with the address of an endpoint. Reasons say it, and if rules do it, why.
	BySocket bool `json:"bySocket,omitempty"`
	// Endpoints are all endpoints of the service port, sorted by address.
	Endpoints []ExplainedEndpoint `json:"endpoints,omitempty"`
}

// ExplainedEndpoint is an endpoint from the viewpoint of one packet.
type ExplainedEndpoint struct {
	changetracker.Endpoint

	// Local reports whether the endpoint runs on the Resolver's node.
	Local bool `json:"local"`
	// Excluded is why the packet cannot go there; empty if it can.
	Excluded changetracker.Exclusion `json:"excluded,omitempty"`
	// Masquerade reports whether the packet's source is replaced if it goes there: because the
	// Explanation says so, or because the packet comes from there (hairpin).
	Masquerade bool `json:"masquerade"`
}

// Explain explains what the data plane does with a packet, by the decisions that the data plane is programmed with.
// nodeAddresses are the addresses of the node's interfaces. traits returns the engine's Traits for a service port, or
// with nil for addresses without one; a nil traits gives the zero value. Explain costs the service ports that the
// packet may be for and their endpoints, not the number of Services. The error wraps ErrPacket.
func (r *Resolved) Explain(packet Packet, nodeAddresses []netip.Addr, traits func(*Service) Traits) (Explanation, error) {
	x := explainer{Resolver: r.resolver, Globals: r.globals, State: r.state, NodeAddresses: nodeAddresses, Traits: traits}
	return x.explain(packet)
}

// explainer has what decides about packets.
type explainer struct {
	Resolver Resolver
	Globals  Globals
	State    *changetracker.State
	// NodeAddresses and Traits are those of Resolved.Explain.
	NodeAddresses []netip.Addr
	Traits        func(*Service) Traits
}

// traitsOf asks about the frontends of a kind, or with nil about addresses without a Service.
func (x *explainer) traitsOf(s *Service, kind Kind) (t Traits) {
	if x.Traits == nil {
		return t
	}
	other := func(f Frontend) bool { return f.Kind != kind }
	if s != nil && slices.ContainsFunc(s.Frontends, other) {
		part := *s
		part.Frontends = slices.DeleteFunc(slices.Clone(s.Frontends), other)
		s = &part
	}
	return x.Traits(s)
}

// explain explains one packet.
func (x *explainer) explain(packet Packet) (Explanation, error) {
	if err := packet.Validate(); err != nil {
		return Explanation{}, err
	}
	packet.Source = packet.Source.Unmap().WithZone("")
	packet.Destination = netip.AddrPortFrom(packet.Destination.Addr().Unmap().WithZone(""), packet.Destination.Port())
	e := x.explaining(packet)
	service, frontend := e.choose()
	if service == nil {
		e.unserved()
		return e.Explanation, nil
	}
	e.served(service, frontend)
	return e.Explanation, nil
}

// explaining is an Explanation that is not complete yet.
type explaining struct {
	*explainer
	Explanation

	resolved       *Resolved
	traits         Traits // of the engine that handles the packet
	shortCircuited bool   // externalTrafficPolicy Local does not bind the packet
	atSocket       bool   // a socket at localhost gets the packet
}

func (x *explainer) explaining(packet Packet) *explaining {
	return &explaining{
		explainer: x, Explanation: Explanation{Packet: packet}, resolved: NewResolved(x.State, x.Resolver, x.Globals), traits: x.traitsOf(nil, 0),
	}
}

func (e *explaining) because(format string, args ...any) {
	e.Reasons = append(e.Reasons, fmt.Sprintf(format, args...))
}

// choose returns the service port that gets the packet, and its frontend: the one with the
// VIP, or else the one with the node port.
func (e *explaining) choose() (*Service, *Frontend) {
	to := e.Packet.Destination
	vip, nodePort := Key{to.Addr(), e.Packet.Protocol, to.Port()}, Key{Protocol: e.Packet.Protocol, Port: to.Port()}
	first, isVIP := e.resolved.first(vip)
	owner, _ := e.resolved.Owner(vip)
	if isVIP && owner == first.Name {
		return e.frontend(owner, vip)
	}
	owner, _ = e.resolved.Owner(nodePort)
	s, f := e.frontend(owner, nodePort)
	if isVIP {
		e.because("%v is also a VIP of %v, but the Service that has the node port is older", to, first.Name)
	} else if s == nil || e.acceptsNodePorts(e.traitsOf(s, NodePort)) != nil {
		return nil, nil
	}
	return s, f
}

func (e *explaining) frontend(name changetracker.ServicePortName, key Key) (*Service, *Frontend) {
	if s, ok := e.resolved.Service(name); ok {
		return s, s.find(key)
	}
	return nil, nil
}

func (e *explaining) protocol() v1.Protocol { return v1.Protocol(e.Packet.Protocol.String()) }

// services yields the service ports with these names.
func (e *explaining) services(names iter.Seq[changetracker.ServicePortName]) iter.Seq[*Service] {
	return func(yield func(*Service) bool) {
		for name := range names {
			if s, ok := e.Resolver.Resolve(e.State, name); ok && !yield(s) {
				return
			}
		}
	}
}

// acceptsNodePorts returns why the destination does not accept node ports, or nil.
func (e *explaining) acceptsNodePorts(t Traits) error {
	addr := e.Packet.Destination.Addr()
	switch {
	case e.reachesSocket(t):
		return nil
	case addr.IsLoopback() && (addr.Is6() || !t.LoopbackNodePorts):
		return fmt.Errorf("%v is a loopback address", addr)
	case !addr.IsLoopback() && !slices.Contains(e.NodeAddresses, addr):
		return fmt.Errorf("%v is not an address of this node", addr)
	case !contains(e.Globals.NodePortAddresses, addr):
		return fmt.Errorf("%v is not among the addresses that accept node ports", addr)
	}
	return nil
}

// reachesSocket reports whether a socket at localhost gets the packet, if it is for a node port.
func (e *explaining) reachesSocket(t Traits) bool {
	return t.LocalhostSockets && e.Globals.LocalhostNodePorts && e.Packet.Protocol != SCTP && isLocalhost(e.Packet.Destination.Addr())
}

// unserved explains a packet that is for no frontend.
func (e *explaining) unserved() {
	if e.refusedByVIP() {
		return
	}
	port := e.Packet.Destination.Port()
	for s := range e.services(e.State.ByNodePort(port, e.protocol())) {
		if err := e.acceptsNodePorts(e.traitsOf(s, NodePort)); err != nil {
			e.because("%d is a node port of %v, but %v", port, s.Name, err)
		}
	}
	e.noService()
}

// noService explains a packet to an address without a Service.
func (e *explaining) noService() {
	addr := e.Packet.Destination.Addr()
	if contains(e.Globals.ServiceCIDRs, addr) && !e.traits.ServiceIPsPass && !e.isToNode() {
		e.Verdict = VerdictDrop
		e.because("%v is in a range of cluster IPs, but no Service has it", addr)
		return
	}
	e.Verdict = VerdictPass
	where := "the packet is routed as usual"
	if e.isToNode() {
		where = "the node itself has the address"
	}
	e.notExposed()
	e.because("no Service has %v/%v: %s", e.Packet.Destination, e.Packet.Protocol, where)
}

// notExposed names the service ports that other nodes serve at the destination.
func (e *explaining) notExposed() {
	to := e.Packet.Destination
	for name, p := range e.State.All() {
		p = p.Elsewhere()
		if p == nil || name.Protocol != e.protocol() {
			continue
		}
		if e.isToNode() && p.NodePort == to.Port() || p.Port == to.Port() && (containsAddr(p.LoadBalancerVIPs, to.Addr()) || containsAddr(p.ExternalIPs, to.Addr())) {
			e.because("%v has %v/%v on nodes with %q, and this node has other labels", name, to, e.Packet.Protocol, p.ExposeOn)
		}
	}
}

// isToNode reports whether the destination is an address of the node.
func (e *explaining) isToNode() bool {
	return slices.Contains(e.NodeAddresses, e.Packet.Destination.Addr())
}

// refusedByVIP explains a packet to a VIP that rejects packets to ports without a frontend. It
// returns false if there is no such VIP.
func (e *explaining) refusedByVIP() bool {
	if e.isToNode() {
		return false
	}
	addr, port := e.Packet.Destination.Addr(), e.Packet.Destination.Port()
	for s := range e.services(e.State.ByVIP(addr)) {
		t, isCluster, what := e.traitsOf(s, kindAt(s, addr)), s.Port.ClusterIP == addr, "a VIP"
		closed := t.VIPsAreLocal || t.ClosedLoadBalancerIPs && hasVIP(s, addr, LoadBalancer)
		if isCluster && t.ServiceIPsPass || !isCluster && !closed || !hasVIP(s, addr) {
			continue
		}
		if isCluster {
			what = "the cluster IP"
		}
		e.because("%v is %s of Service %v, which has no port %d/%v", addr, what, s.Name.NamespacedName, port, e.Packet.Protocol)
		if e.Verdict = VerdictReject; t.VIPsAreLocal && e.isHealthCheck() {
			e.Verdict = VerdictPass
			e.because("%d is a health check node port, and the node has the address: the health check server answers", port)
		}
		return true
	}
	return false
}

// hasVIP reports whether some frontend has the address, and is of one of the kinds; none means all.
func hasVIP(s *Service, addr netip.Addr, kinds ...Kind) bool {
	return slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return f.VIP == addr && (len(kinds) == 0 || slices.Contains(kinds, f.Kind)) })
}

// kindAt returns the kind of the first frontend with an address; 0 if there is none.
func kindAt(s *Service, addr netip.Addr) Kind {
	for i := range s.Frontends {
		if s.Frontends[i].VIP == addr {
			return s.Frontends[i].Kind
		}
	}
	return 0
}

// isHealthCheck reports whether the packet is for the health check node port of a Service.
func (e *explaining) isHealthCheck() bool {
	for range e.State.ByHealthCheckNodePort(e.Packet.Destination.Port()) {
		return e.Packet.Protocol == TCP
	}
	return false
}

// served explains a packet for a frontend.
func (e *explaining) served(s *Service, f *Frontend) {
	e.Service, e.Frontend, e.Affinity, e.Scope = &s.Name, f, s.Affinity, f.Scope
	e.traits = e.traitsOf(s, f.Kind)
	e.because("%v is the %v of %v", s.Key(f), f.Kind, s.Name)
	if e.atSocket = e.reachesSocket(e.traits); e.atSocket {
		e.traits.SourceLost, e.traits.LocalPolicyBindsAll = true, false
		e.traits.LeastConnections, e.traits.NoHash, e.traits.Scheduler = true, false, ""
	}
	if f.Restricted && !contains(f.SourceRanges, e.Packet.Source) {
		e.Verdict, e.Scope = VerdictDrop, 0
		if contains(s.Port.DeniedSources, e.Packet.Source) {
			e.because("source %v is in the denied ranges %v", e.Packet.Source, s.Port.DeniedSources)
		} else {
			e.because("source %v is not in the source ranges %v", e.Packet.Source, f.SourceRanges)
		}
		e.list(s)
		return
	}
	if limit := s.ClientLimit(f); !limit.IsZero() && e.traits.ClientLimits {
		e.Limit = limit.String()
		e.because("each client is limited to %v", limit)
	}
	action := f.Action
	if f.ShortCircuit && e.shortCircuits() {
		action = Forward
		if !e.traits.LocalPolicyBindsAll || s.Endpoints(f.Scope).Len() == 0 {
			e.Scope = ScopeCluster
		}
	}
	e.list(s)
	switch action {
	case Forward:
		e.forward(s, f)
	case Drop:
		e.Verdict = VerdictDrop
		e.because("traffic policy %v: there are endpoints, but none on this node can take the connection", e.Scope)
	case Reject:
		e.Verdict = VerdictReject
		e.because("no endpoint on any node can take the connection")
	}
	if e.Verdict != VerdictForward {
		e.Affinity = 0
	}
}

// shortCircuits reports whether externalTrafficPolicy Local does not bind the packet, and adds
// why.
func (e *explaining) shortCircuits() bool {
	to := "go to all endpoints"
	if e.traits.LocalPolicyBindsAll {
		to = "go to the endpoints on this node if there are any, otherwise to all endpoints"
	}
	switch {
	case e.isPods():
		e.because("external traffic policy Local does not bind pods: their packets keep their source and %s", to)
	case e.isNodes():
		e.because("external traffic policy Local does not bind the node itself: its packets are masqueraded and %s", to)
		e.Masquerade = true
	default:
		return false
	}
	e.shortCircuited = true
	return true
}

// isPods reports whether the local detector recognises the packet as a pod's.
func (e *explaining) isPods() bool {
	name := e.Globals.PodInterface
	if name == "" {
		return contains(e.Globals.PodCIDRs, e.Packet.Source)
	}
	if e.Packet.Interface == "" {
		return e.Packet.Origin == FromPod
	}
	prefix, isPrefix := strings.CutSuffix(name, "*")
	return e.Packet.Interface == name || isPrefix && strings.HasPrefix(e.Packet.Interface, prefix)
}

func (e *explaining) isNodes() bool {
	return e.Packet.Origin == FromNode || slices.Contains(e.NodeAddresses, e.Packet.Source)
}

// forward explains what happens to the source of a packet that goes to an endpoint.
func (e *explaining) forward(s *Service, f *Frontend) {
	e.Verdict = VerdictForward
	eligible := s.Endpoints(e.Scope).Len()
	e.socket(s, f)
	e.because("traffic policy %v: %d of %d endpoints may be chosen", e.Scope, eligible, len(e.Endpoints))
	e.source(f)
	e.balance(s)
	if s.Affinity > 0 {
		e.because("session affinity: the client stays with its endpoint for %v after its last connection, at any address of the Service", s.Affinity)
	}
	for i := range e.Endpoints {
		p := &e.Endpoints[i]
		if p.Excluded != "" {
			continue
		}
		hairpin := !e.BySocket && !e.direct() && p.Addr.Addr() == e.Packet.Source && slices.Contains(s.OnNode, e.Packet.Source)
		p.Masquerade = e.Masquerade || hairpin
		if hairpin && !e.Masquerade {
			e.because("the source is masqueraded if the packet returns to the endpoint that sent it, %v", p.Addr)
		}
	}
}

// direct reports whether the endpoint gets the packet unchanged.
func (e *explaining) direct() bool { return e.traits.DirectReturn && e.Frontend.Kind != NodePort }

// source explains what an endpoint sees as the source.
func (e *explaining) source(f *Frontend) {
	switch {
	case e.traits.SourceLost:
		e.Masquerade = true
		e.because("the endpoint sees the node's address, because the proxy opens the connection itself")
	case e.direct():
		e.because("the source is kept, and the destination too: the endpoint has the address, and replies to the client itself")
	case e.shortCircuited: // already explained
	case e.BySocket:
		e.Masquerade = e.isNodes()
		e.because("the source is the address that routing chooses for the socket")
	case f.Masquerade == MasqueradeAll:
		e.Masquerade = true
		e.because("the source is masqueraded: %s", masqueradeReason(f))
	case f.Masquerade == MasqueradeNonPod && !e.isPods():
		e.Masquerade = true
		e.because("the source is masqueraded: %v is not the address of a pod", e.Packet.Source)
	case f.Masquerade == MasqueradeNonPod:
		e.because("the source is kept: %v is the address of a pod", e.Packet.Source)
	default:
		e.because("the source is kept")
	}
}

// socket explains whether a socket or rules translate the packet, in an engine that has both.
func (e *explaining) socket(s *Service, f *Frontend) {
	if e.traits.Sockets == nil {
		return
	}
	by, why := e.traits.Sockets(s, f, &e.Globals)
	switch here := e.isNodes() || e.isPods() && contains(e.Resolver.Node.PodCIDRs, e.Packet.Source); {
	case !here:
		e.because("by rules, because the client is not on this node")
	case !by:
		e.because("by rules, because %s", why)
	default:
		e.BySocket = true
		e.because("by a socket: the client's connect(2) goes to an endpoint, unless rules do it for its network namespace, cgroup, or bound address")
	}
}

// balance explains how an endpoint is chosen.
func (e *explaining) balance(s *Service) {
	e.Balancing = e.traits.Balancing(s)
	share := ""
	if s.Weights(e.Scope) != nil {
		share = ", in proportion to the weights"
	}
	wanted, by := s.balancing(), e.traits.Scheduler
	if by != "" {
		e.Balancing, e.Scheduler = e.traits.SchedulesLike, by
	}
	switch {
	case wanted != e.Balancing && by != "":
		e.because("load balancing policy %v: the settings of the engine choose the scheduler %s instead%s", wanted, by, share)
	case wanted == changetracker.LeastConnections && wanted != e.Balancing && e.traits.LeastByWeights:
		e.because("load balancing policy %v: at random, by the weights that package leastconnections gives", wanted)
	case wanted != e.Balancing:
		e.because("load balancing policy %v: this engine does not have it, and chooses an endpoint at random%s", wanted, share)
	case wanted.Hashes() && s.MaxSlots() > 0:
		e.because("load balancing policy %v, in a table of at most %d slots because the Service has many frontends%s", wanted, s.MaxSlots(), share)
	case wanted != changetracker.Random || share != "":
		e.because("load balancing policy %v%s", wanted, share)
	}
}

func masqueradeReason(f *Frontend) string {
	if f.Kind == ClusterIP {
		return "MasqueradeAll is set"
	}
	return "the reply must return through this node"
}

// list lists the endpoints, with the reason for each that is not in the scope.
func (e *explaining) list(s *Service) {
	var remarks []string
	e.Endpoints, remarks = e.Resolver.considered(e.State, s.Port, e.Scope)
	for _, remark := range remarks {
		if e.Scope != 0 {
			e.because("%s", remark)
		}
	}
}

// considered returns the endpoints of the State, with the reason for each that is not in the
// scope, and the endpoints that EditSelection adds.
func (r *Resolver) considered(state *changetracker.State, p *changetracker.ServicePort, scope Scope) (list []ExplainedEndpoint, remarks []string) {
	endpoints := state.Endpoints(p.Name)
	var why []changetracker.Exclusion
	if scope == ScopeLocal {
		why, remarks = changetracker.ExplainLocal(p, endpoints, r.Node)
	} else {
		why, remarks = changetracker.ExplainCluster(p, endpoints, r.Node)
	}
	view := state.For(r.Node)
	list = make([]ExplainedEndpoint, len(endpoints))
	for i := range endpoints {
		list[i] = ExplainedEndpoint{Endpoint: endpoints[i], Local: view.Local(&endpoints[i]), Excluded: why[i]}
	}
	if r.EditSelection == nil {
		return list, remarks
	}
	selection := r.edited(state, p, endpoints)
	chosen := selection.Cluster
	if scope == ScopeLocal {
		chosen = selection.Local
	}
	byAddr := func(e changetracker.Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) }
	for i := range list {
		_, isChosen := slices.BinarySearchFunc(chosen, list[i].Addr, byAddr)
		switch {
		case isChosen:
			list[i].Excluded = ""
		case list[i].Excluded == "":
			list[i].Excluded = changetracker.ExcludedByHook
		}
	}
	for i := range chosen {
		if _, isKnown := slices.BinarySearchFunc(endpoints, chosen[i].Addr, byAddr); !isKnown {
			list = append(list, ExplainedEndpoint{Endpoint: chosen[i], Local: view.Local(&chosen[i])})
		}
	}
	slices.SortFunc(list, func(a, b ExplainedEndpoint) int { return a.Addr.Compare(b.Addr) })
	return list, remarks
}
