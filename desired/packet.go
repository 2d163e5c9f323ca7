package desired

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/enum"
)

// Packet is the first packet of a connection, as it reaches the node. All fields but Interface are required.
type Packet struct {
	Protocol Protocol `json:"protocol"`
	// Source and Destination are of the same IP family. The port of the source does not matter.
	Source      netip.Addr     `json:"source"`
	Destination netip.AddrPort `json:"destination"`
	// Origin is where the packet comes from. Pods are detected by address or by interface, as
	// configured; in the latter case Origin decides if Interface is empty.
	Origin Origin `json:"origin"`
	// Interface is where the packet arrives; empty if unknown, or with FromNode.
	Interface string `json:"interface,omitempty"`
}

// Origin is where a packet comes from.
type Origin uint8

// The origins.
const (
	FromOutside Origin = iota + 1
	FromPod
	FromNode
)

// String is "outside", "pod" or "node".
func (o Origin) String() string { return enum.Name(o, originNames...) }

var originNames = []string{"", "outside", "pod", "node"} // read-only

// ErrPacket is wrapped by every error of Packet.Validate.
var ErrPacket = errors.New("not a packet that can be explained")

// Validate returns every invalid field.
func (p *Packet) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrPacket, fmt.Sprintf(format, args...)))
	}
	if p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP {
		bad("protocol: %d is none of 6 (TCP), 17 (UDP) and 132 (SCTP)", uint8(p.Protocol))
	}
	if !p.Source.IsValid() {
		bad("source: missing: set an address")
	}
	if !p.Destination.Addr().IsValid() || p.Destination.Port() == 0 {
		bad("destination: %v is not an address and a port", p.Destination)
	}
	if p.Source.IsValid() && p.Destination.Addr().IsValid() && p.Source.Unmap().Is4() != p.Destination.Addr().Unmap().Is4() {
		bad("source %v and destination %v are of different IP families", p.Source, p.Destination.Addr())
	}
	if p.Origin < FromOutside || p.Origin > FromNode {
		bad("origin: want outside, pod or node")
	}
	return errors.Join(errs...)
}

// Verdict is what happens to a packet.
type Verdict uint8

// The verdicts.
const (
	// VerdictPass means that the packet is for no Service: it is routed as usual.
	VerdictPass Verdict = iota + 1
	// VerdictForward translates the destination to one of the endpoints.
	VerdictForward
	// VerdictReject answers with ICMP port unreachable.
	VerdictReject
	// VerdictDrop sends no answer.
	VerdictDrop
)

// String is the lower-case name of the verdict.
func (v Verdict) String() string { return enum.Name(v, "", "pass", "forward", "reject", "drop") }

// Traits are differences between engines that packets can observe. The zero value is that of
// the nftables engine.
type Traits struct {
	// ServiceIPsPass ignores packets to a ClusterIP at a port that the Service does not have,
	// and to an address in the ServiceCIDRs that no Service has. Without it, only those to an
	// address of the node are ignored.
	ServiceIPsPass bool
	// LocalPolicyBindsAll restricts pods and the node itself to local endpoints under
	// externalTrafficPolicy Local, as long as there are any.
	LocalPolicyBindsAll bool
	// VIPsAreLocal rejects packets to another port of any VIP, as for ClusterIPs, because the
	// node has the VIPs as addresses. Health check node ports are reachable there.
	VIPsAreLocal bool
	// ClosedLoadBalancerIPs rejects packets to another port of a load balancer IP, as for ClusterIPs.
	ClosedLoadBalancerIPs bool
	// SourceLost shows endpoints an address of the node instead of the client's, whatever a
	// frontend masquerades.
	SourceLost bool
	// DirectReturn forwards packets unchanged, except those to node ports: endpoints have the VIP, see
	// the client's address whatever a frontend masquerades, and reply to the client without this node.
	DirectReturn bool
	// LoopbackNodePorts accepts node ports on 127.0.0.0/8, if that is in NodePortAddresses.
	LoopbackNodePorts bool
	// LocalhostSockets accepts node ports at 127.0.0.1 and ::1 if Globals.LocalhostNodePorts is
	// set, by sockets of the proxy: endpoints see an address of the node, and
	// externalTrafficPolicy Local does not bind the clients.
	LocalhostSockets bool
	// LeastConnections is whether the engine has this policy. Without it, service ports that
	// ask for it have Random.
	LeastConnections bool
	// LeastByWeights is whether service ports that have Random instead get weights by their open connections: see package
	// leastconnections.
	LeastByWeights bool
	// NoHash is whether the engine lacks the policies SourceHash and SourcePortHash: service
	// ports that ask for one have Random.
	NoHash bool
	// ClientLimits is whether the engine bounds the connections of a client: see changetracker.ClientLimit.
	ClientLimits bool
	// FastPath is whether established connections of service ports that ask for it skip the
	// node's rules: see TakesFastPath.
	FastPath bool
	// Sockets is for an engine that translates the node's sockets, and those of pods on it, when they connect: it
	// reports whether it does so for a frontend of a service port, and if not, why; then rules do. It is pure. nil
	// means that rules do everything.
	Sockets func(s *Service, f *Frontend, g *Globals) (carried bool, why string)
	// Scheduler is the kernel's name of what chooses the endpoints of the service port, such as "wrr", in an engine
	// whose settings may replace the load balancing policy: IPVS. Empty means the policy. SchedulesLike is the policy
	// that is most like the scheduler.
	Scheduler     string
	SchedulesLike changetracker.Balancing
}

// TakesFastPath reports whether established connections of a service port skip the node's rules.
// The kernel has no fast path for SCTP.
func (t Traits) TakesFastPath(s *Service) bool {
	return t.FastPath && s.Port != nil && s.Port.FastPath && s.Protocol != SCTP
}

// Balancing returns the policy by which an engine with these Traits chooses an endpoint of a
// service port.
func (t Traits) Balancing(s *Service) changetracker.Balancing {
	switch wanted := s.balancing(); {
	case wanted.Hashes() && t.NoHash, wanted == changetracker.LeastConnections && !t.LeastConnections:
		return changetracker.Random
	default:
		return wanted
	}
}
