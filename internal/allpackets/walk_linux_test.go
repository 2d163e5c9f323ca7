package allpackets

import (
	"encoding/binary"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/oracle"
)

// ruleset interprets rules for one packet.
type ruleset interface {
	// walk takes a packet through the rules once. It calls dice for each random choice.
	walk(p *packet, dice func(sides int) int) error
}

// packet is a packet on its way through the hooks of a node.
type packet struct {
	protocol         desired.Protocol
	source, dest     netip.AddrPort
	fromNode         bool
	isLocal          func(netip.Addr) bool // what the routing table says
	mark, priority   uint32
	translated, masq bool
	verdict          string // "reject" or "drop"
}

func (p *packet) outcome() oracle.Outcome {
	o := oracle.Outcome{Verdict: p.verdict, Masquerade: p.masq}
	if o.Verdict == "" {
		o.Verdict = "pass"
		if p.translated {
			o.Verdict, o.Endpoint = "forward", p.dest
		}
	}
	return o
}

// outcomes takes a packet through the rules once for each way that the dice may fall.
func outcomes(rules ruleset, p oracle.Packet, isLocal func(netip.Addr) bool) ([]oracle.Outcome, error) {
	var (
		all         []oracle.Outcome
		fell, sides []int
	)
	for {
		rolls := 0
		dice := func(n int) int {
			if rolls == len(fell) {
				fell, sides = append(fell, 0), append(sides, n)
			}
			rolls++
			return fell[rolls-1]
		}
		on := &packet{protocol: p.Protocol, source: p.Source, dest: p.Destination, fromNode: p.FromNode, isLocal: isLocal}
		if err := rules.walk(on, dice); err != nil {
			return nil, err
		}
		all = append(all, on.outcome())
		for len(fell) > 0 && fell[len(fell)-1] == sides[len(fell)-1]-1 {
			fell, sides = fell[:len(fell)-1], sides[:len(fell)-1]
		}
		if len(fell) == 0 {
			return oracle.Sorted(all), nil
		}
		fell[len(fell)-1]++
	}
}

// headers returns the network header, as far as rules read it, and the ports.
func (p *packet) headers() (network, transport []byte) {
	src, dst := p.source.Addr().AsSlice(), p.dest.Addr().AsSlice()
	network = make([]byte, 8, 40)
	if len(src) == 4 {
		network = network[:12]
	}
	network = append(append(network, src...), dst...)
	transport = binary.BigEndian.AppendUint16(nil, p.source.Port())
	return network, binary.BigEndian.AppendUint16(transport, p.dest.Port())
}
