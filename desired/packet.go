package desired

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/internal/enum"
)

// Packet is the first packet of a connection, as it reaches the node.
type Packet struct {
	Protocol Protocol `json:"protocol"`
	// Source and Destination are of the same IP family. The source's port never
	// matters.
	Source      netip.Addr     `json:"source"`
	Destination netip.AddrPort `json:"destination"`
	// Origin is where the packet comes from. Pods are told by their address or by
	// the interface, as the proxy is configured; Origin decides in the latter case,
	// if Interface is empty.
	Origin Origin `json:"origin"`
	// Interface is where the packet arrives; empty if that is not known, or FromNode.
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
func (o Origin) String() string { return enum.Name(o, originNames()...) }

func originNames() []string { return []string{"", "outside", "pod", "node"} }

// ErrPacket is in every error of Packet.Validate.
var ErrPacket = errors.New("not a packet that can be explained")

// Validate says what is wrong with a packet.
func (p *Packet) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrPacket, fmt.Sprintf(format, args...)))
	}
	if p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP {
		bad("protocol: %d is none of 6 (TCP), 17 (UDP) and 132 (SCTP)", uint8(p.Protocol))
	}
	if !p.Source.IsValid() {
		bad("source: no address")
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

// Verdict is what becomes of a packet.
type Verdict uint8

// The verdicts.
const (
	// VerdictPass means that the packet is no Service's: it goes where routes lead.
	VerdictPass Verdict = iota + 1
	// VerdictForward translates the destination to one of the endpoints.
	VerdictForward
	// VerdictReject answers with ICMP port unreachable.
	VerdictReject
	// VerdictDrop answers nothing.
	VerdictDrop
)

// String is the lower-case name of the verdict.
func (v Verdict) String() string { return enum.Name(v, "", "pass", "forward", "reject", "drop") }

// Traits are what packets can see of an engine's own ways. The zero value is the
// nftables engine's.
type Traits struct {
	// ServiceIPsPass leaves packets alone that are sent to a ClusterIP with a port
	// that the Service does not have, or to an address of the Service ranges that no
	// Service has. Without it, only those for an address of the node are left alone.
	ServiceIPsPass bool
	// LocalPolicyBindsAll confines pods and the node itself to local endpoints under
	// externalTrafficPolicy Local, as long as there are any.
	LocalPolicyBindsAll bool
	// VIPsAreLocal refuses what is sent to another port of any VIP, as it does for
	// ClusterIPs, since the node has the VIPs; health check node ports are answered there.
	VIPsAreLocal bool
	// SourceLost shows endpoints an address of the node instead of the client's,
	// whatever a frontend masquerades.
	SourceLost bool
	// LoopbackNodePorts accepts node ports on 127.0.0.0/8, if that is among the
	// addresses that accept them.
	LoopbackNodePorts bool
}
