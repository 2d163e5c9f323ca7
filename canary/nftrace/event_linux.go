package nftrace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Numbers of linux/netfilter/nf_tables.h that package unix does not have.
const (
	msgTrace    = unix.NFNL_SUBSYS_NFTABLES<<8 | 17 // NFT_MSG_TRACE
	traceTable  = 1
	traceChain  = 2
	traceHandle = 3
	traceType   = 4
	traceResult = 5 // NFTA_TRACE_VERDICT
	traceID     = 6
	traceHeader = 8 // NFTA_TRACE_NETWORK_HEADER
	tracePolicy = 16
	typePolicy  = 1 // NFT_TRACETYPE_POLICY
	verdictCode = 1 // NFTA_VERDICT_CODE
	verdictDrop = 0 // NF_DROP of linux/netfilter.h, also after a reject
	nfgenLen    = 4 // sizeof(struct nfgenmsg)
)

// event is one step of a packet.
type event struct {
	family       byte
	table, chain string
	handle       uint64 // of the rule; 0 for the policy of the chain
	id           uint32 // of the packet at one hook
	drops        bool
	// The addresses of the packet are valid in the first event of each base chain.
	source, destination netip.Addr
}

// String says where the packet ended.
func (e event) String() string {
	family := map[byte]string{
		unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_NETDEV: "netdev", unix.NFPROTO_BRIDGE: "bridge",
	}[e.family]
	if e.handle == 0 {
		return fmt.Sprintf("stopped by the policy drop of chain %s in table %s %s: accept the packets there", e.chain, family, e.table)
	}
	return fmt.Sprintf("stopped by the rule with handle %[1]d of chain %[2]s in table %[3]s %[4]s: see nft -a list chain %[3]s %[4]s %[2]s", e.handle, e.chain, family, e.table)
}

var errOtherMessage = errors.New("not an event")

// parse decodes an event.
func parse(m netlink.Message) (e event, err error) {
	if m.Header.Type != msgTrace || len(m.Data) < nfgenLen {
		return e, errOtherMessage
	}
	e.family = m.Data[0]
	ad, err := netlink.NewAttributeDecoder(m.Data[nfgenLen:])
	if err != nil {
		return e, fmt.Errorf("decode trace: %w", err)
	}
	ad.ByteOrder = binary.BigEndian
	var end verdict
	for ad.Next() {
		switch ad.Type() {
		case traceTable:
			e.table = ad.String()
		case traceChain:
			e.chain = ad.String()
		case traceHandle:
			e.handle = ad.Uint64()
		case traceID:
			e.id = ad.Uint32()
		case traceHeader:
			e.source, e.destination = addresses(ad.Bytes())
		default:
			end.decode(ad)
		}
	}
	e.drops = end.drops()
	return e, ad.Err()
}

// verdict is the result of a rule, or of the policy of a chain.
type verdict struct {
	isPolicy           bool
	hasCode, hasPolicy bool
	code, policy       uint32
}

func (v *verdict) drops() bool {
	if v.isPolicy {
		return v.hasPolicy && v.policy == verdictDrop
	}
	return v.hasCode && v.code == verdictDrop
}

// decode takes over an attribute of an event, if it is about the verdict.
func (v *verdict) decode(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case traceType:
		v.isPolicy = ad.Uint32() == typePolicy
	case tracePolicy:
		v.hasPolicy, v.policy = true, ad.Uint32()
	case traceResult:
		ad.Nested(func(nested *netlink.AttributeDecoder) error {
			nested.ByteOrder = binary.BigEndian
			for nested.Next() {
				if nested.Type() == verdictCode {
					v.hasCode, v.code = true, nested.Uint32()
				}
			}
			return nil
		})
	}
}

// addresses reads those of the header of an IP packet; they are invalid if it is none.
func addresses(b []byte) (source, destination netip.Addr) {
	const version4, version6, shift = 4, 6, 4
	size := 0
	if len(b) > 0 {
		size = map[byte]int{version4: 4, version6: 16}[b[0]>>shift]
	}
	if size == 0 {
		return source, destination
	}
	at := header{12, 16}
	if size == 16 {
		at = header{8, 24}
	}
	if len(b) < int(at.destination)+size {
		return source, destination
	}
	source, _ = netip.AddrFromSlice(b[at.source : int(at.source)+size])
	destination, _ = netip.AddrFromSlice(b[at.destination : int(at.destination)+size])
	return source, destination
}
