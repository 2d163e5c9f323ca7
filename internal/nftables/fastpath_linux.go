package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// The fast path is a flowtable: its hook at ingress of each device forwards the packets of the
// flows in it, before any rule. A rule of a chain at hook forward puts flows there.

const (
	chainFastPath   = "fast-path"
	flowtableOfOurs = "fast-path"
	// fastPathPriority is after the chains in which others filter, so that what they drop never
	// counts as established here.
	fastPathPriority = 200
	// ctStateEstablished is of net/netfilter/nf_conntrack.h, NF_CT_STATE_BIT(IP_CT_ESTABLISHED).
	ctStateEstablished = 0x02
	directionReply     = 1 // IP_CT_DIR_REPLY of linux/netfilter/nf_conntrack_tuple_common.h
)

func fastPathHook() *hookSpec {
	return &hookSpec{"filter", unix.NF_INET_FORWARD, "forward", fastPathPriority}
}

// asksForFastPath reports whether the configuration has a fast path.
func (e *Engine) asksForFastPath() bool { return e.config.FastPathAfter > 0 }

// fastAfter is the number of packets until the fast path; 0 is none.
func (e *Engine) fastAfter() uint32 {
	if !e.asksForFastPath() || e.fast.Load() == hashMissing {
		return 0
	}
	return e.config.FastPathAfter
}

// fastPath puts established flows into the flowtable. Others translate addresses too: these are
// flows to VIPs of ours, or to a node port of ours that led to an endpoint of ours.
func (r *rules) fastPath() []rule {
	packets := make([]byte, 0, 8)
	for shift := 56; shift >= 0; shift -= 8 {
		packets = append(packets, byte(uint64(r.fastAfter)>>shift))
	}
	flow := func(key rule, in setID) rule {
		return slices.Concat(rule{
			&expr.Ct{Key: expr.CtKeySTATE, Register: reg(0)}, and(0, 0, ctStateEstablished), notZero(0),
			&expr.Ct{Key: expr.CtKeySTATUS, Register: reg(0)}, and(0, 0, ctStatusDNAT), notZero(0),
			&expr.Ct{Key: expr.CtKeyPKTS, Register: reg(0)},
			&expr.Byteorder{SourceRegister: reg(0), DestRegister: reg(0), Op: expr.ByteorderHton, Len: 8, Size: 8},
			&expr.Cmp{Op: expr.CmpOpGt, Register: reg(0), Data: packets},
		}, key, rule{lookupSet(in, reg(0)), &expr.FlowOffload{Name: flowtableOfOurs + "\x00"}})
	}
	n := r.addrRegs()
	return []rule{
		flow(rule{r.dialledAddr(0), l4proto(n), dialledPort(n + 1)}, setFastVIPs),
		flow(rule{
			l4proto(0), dialledPort(1),
			r.server(2),
			nft.Tracked{Ct: &expr.Ct{Key: expr.CtKeyPROTOSRC, Register: reg(2 + n), Direction: directionReply}},
		}, setFastNodePorts),
	}
}

// dialledPort loads the port that the client sent its first packet to.
func dialledPort(n int) expr.Any {
	return nft.Tracked{Ct: &expr.Ct{Key: expr.CtKeyPROTODST, Register: reg(n)}}
}

// dialledAddr loads the address that the client sent its first packet to.
func (r *rules) dialledAddr(n int) expr.Any {
	return nft.Tracked{Ct: &expr.Ct{Key: either(r.v6, nft.DestinationIPv6, nft.DestinationIPv4), Register: reg(n)}}
}

// server loads the address that the flow's answers come from.
func (r *rules) server(n int) expr.Any {
	return nft.Tracked{Ct: &expr.Ct{Key: either(r.v6, nft.SourceIPv6, nft.SourceIPv4), Register: reg(n), Direction: directionReply}}
}

// fastNodePort is a node port and one of its endpoints.
type fastNodePort struct {
	frontend desired.Key
	endpoint netip.AddrPort
}

func (f fastNodePort) key() elementBytes {
	return frontendKey(f.frontend).addr(f.endpoint.Addr()).port(f.endpoint.Port())
}

// countFast adds the references of a service port to the sets of the fast path.
func (s *state) countFast(p *placed, n int) {
	for i := range p.frontends {
		f := &p.frontends[i]
		if f.key.VIP.IsValid() {
			s.fastVIPs.add(f.key, n)
			continue
		}
		for scope, used := range f.uses {
			if !used {
				continue
			}
			for _, to := range p.lists[scope].all() {
				s.fastNodePorts.add(fastNodePort{f.key, to.addr}, n)
			}
		}
	}
}

// findFlowtables finds out, before the first full update, whether the kernel has flowtables. A
// further full update asks again for what was missing: its module may have been loaded.
func (e *Engine) findFlowtables(ctx context.Context, update *desired.Update) error {
	known := e.fast.Load()
	if !e.asksForFastPath() || known == hashThere || !update.Full {
		return nil
	}
	f := feature{
		name: "flowtables", option: "CONFIG_NF_FLOW_TABLE_INET and CONFIG_NFT_FLOW_OFFLOAD", flowtable: true,
		exprs: rule{&expr.FlowOffload{Name: flowtableOfOurs + "\x00"}},
	}
	return e.findFeature(ctx, &e.fast, f, "kernel has no flowtables: no connection takes the fast path")
}

// flowtable is a flowtable, wanted or in the kernel.
type flowtable struct {
	name     string
	hook     uint32
	priority int32
	flags    uint32
	devices  []string // sorted
}

// wantedFlowtable is ours, without its devices.
func wantedFlowtable() flowtable {
	return flowtable{name: flowtableOfOurs, hook: unix.NF_NETDEV_INGRESS, flags: nft.FlowtableCounter}
}

// shape describes all but the devices.
func (f flowtable) shape() string {
	return fmt.Sprintf("hook %d priority %d flags %d", f.hook, f.priority, f.flags)
}

// print prints it as nft does.
func (f flowtable) print(b *strings.Builder) {
	fmt.Fprintf(b, "\n\tflowtable %s { # established connections that skip the rules\n\t\thook ingress priority %d\n", f.name, f.priority)
	if len(f.devices) > 0 {
		fmt.Fprintf(b, "\t\tdevices = { %s }\n", strings.Join(f.devices, ", "))
	}
	if f.flags&nft.FlowtableCounter != 0 {
		b.WriteString("\t\tcounter\n")
	}
	b.WriteString("\t}\n")
}
