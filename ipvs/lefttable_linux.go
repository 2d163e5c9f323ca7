package ipvs

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
)

// leftTable is the table of Leaving. Its chain refuses new connections to the VIPs: those
// that no rule of the new mode translates must not reach programs of the node.
//
//	set virtual-servers { VIP . protocol . port }
//	set vips            { VIP }
//	chain input (filter, -1) { ct state new ip daddr @vips reject }
type leftTable struct {
	conn          *nftables.Conn
	table         *nftables.Table
	servers, vips *nftables.Set
	v6            bool
	exists        bool
}

// refusalPriority is just before NF_IP_PRI_FILTER (0): a client is refused, whatever others drop there.
const refusalPriority = -1

// elementsAtOnce is how many elements one message has; it must fit into the socket's buffer.
const elementsAtOnce = 200

func openLeftTable(instance string, v6 bool) (*leftTable, error) {
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return nil, err
	}
	t := &leftTable{conn: conn, v6: v6, table: &nftables.Table{Name: instance + ".ipvs-leaving", Family: nftables.TableFamilyIPv4}}
	addr := nftables.TypeIPAddr
	if v6 {
		addr, t.table.Family = nftables.TypeIP6Addr, nftables.TableFamilyIPv6
	}
	server, err := nftables.ConcatSetType(addr, nftables.TypeInetProto, nftables.TypeInetService)
	if err != nil {
		return nil, errors.Join(err, conn.CloseLasting())
	}
	t.servers = &nftables.Set{Table: t.table, Name: "virtual-servers", KeyType: server, Concatenation: true}
	t.vips = &nftables.Set{Table: t.table, Name: "vips", KeyType: addr}
	return t, nil
}

func (t *leftTable) close() { _ = t.conn.CloseLasting() }

// read returns the content; it is empty if there is no table.
func (t *leftTable) read() (servers map[serverKey]bool, vips map[netip.Addr]bool, err error) {
	servers, vips = map[serverKey]bool{}, map[netip.Addr]bool{}
	tables, err := t.conn.ListTablesOfFamily(t.table.Family)
	if err != nil {
		return nil, nil, err
	}
	for _, table := range tables {
		t.exists = t.exists || table.Name == t.table.Name
	}
	if !t.exists {
		return servers, vips, nil
	}
	keys, err := t.conn.GetSetElements(t.servers)
	if err != nil {
		return nil, nil, err
	}
	for i := range keys {
		if key, ok := parseServer(keys[i].Key); ok {
			servers[key] = true
		}
	}
	if keys, err = t.conn.GetSetElements(t.vips); err != nil {
		return nil, nil, err
	}
	for i := range keys {
		vip, _ := netip.AddrFromSlice(keys[i].Key)
		vips[vip] = true
	}
	return servers, vips, nil
}

// serverElement is the key of a virtual server; each part fills registers of 4 bytes.
func serverElement(key serverKey) nftables.SetElement {
	b := append(key.addr.Addr().AsSlice(), uint8(key.protocol), 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, key.addr.Port())
	return nftables.SetElement{Key: append(b, 0, 0)}
}

// parseServer is the inverse of serverElement. Somebody else may have made a set of this
// name with other keys.
func parseServer(b []byte) (key serverKey, ok bool) {
	n := max(len(b)-len("p000PP00"), 0)
	addr, ok := netip.AddrFromSlice(b[:n])
	if !ok {
		return serverKey{}, false
	}
	return serverKey{desired.Protocol(b[n]), netip.AddrPortFrom(addr, binary.BigEndian.Uint16(b[n+4:]))}, true
}

func vipElement(vip netip.Addr) nftables.SetElement { return nftables.SetElement{Key: vip.AsSlice()} }

// add creates the table, unless it exists, and adds elements.
func (t *leftTable) add(servers map[serverKey]bool, vips map[netip.Addr]bool) error {
	if !t.exists {
		if err := t.create(); err != nil {
			return err
		}
		t.exists = true
	}
	return errors.Join(changeSet(t, t.servers, servers, serverElement, t.conn.SetAddElements), changeSet(t, t.vips, vips, vipElement, t.conn.SetAddElements))
}

// remove removes elements, which must be there.
func (t *leftTable) remove(servers map[serverKey]bool, vips map[netip.Addr]bool) error {
	return errors.Join(changeSet(t, t.servers, servers, serverElement, t.conn.SetDeleteElements), changeSet(t, t.vips, vips, vipElement, t.conn.SetDeleteElements))
}

func (t *leftTable) create() error {
	t.conn.AddTable(t.table)
	for _, set := range []*nftables.Set{t.servers, t.vips} {
		if err := t.conn.AddSet(set, nil); err != nil {
			return err
		}
	}
	chain := t.conn.AddChain(&nftables.Chain{
		Name: "input", Table: t.table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityRef(refusalPriority),
	})
	t.conn.AddRule(&nftables.Rule{Table: t.table, Chain: chain, Exprs: t.refusal()})
	return t.conn.Flush()
}

// refusal answers the first packet of a connection to a VIP with port unreachable.
func (t *leftTable) refusal() []expr.Any {
	const (
		icmpPort, icmp6Port = 3, 4 // ICMP_PORT_UNREACH, ICMPV6_PORT_UNREACH of the kernel's headers
		offset4, offset6    = 16, 24
	)
	daddr := &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset4, Len: 4}
	reject := &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: icmpPort}
	if t.v6 {
		daddr.Offset, daddr.Len, reject.Code = offset6, 16, icmp6Port
	}
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitNEW), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		daddr,
		&expr.Lookup{SourceRegister: 1, SetName: t.vips.Name},
		reject,
	}
}

// delete deletes the table, if it exists.
func (t *leftTable) delete() error {
	if !t.exists {
		return nil
	}
	t.conn.DelTable(t.table)
	if err := t.conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	t.exists = false
	return nil
}

// changeSet adds or deletes elements of a set, some at a time.
func changeSet[K comparable](t *leftTable, set *nftables.Set, keys map[K]bool, element func(K) nftables.SetElement, write func(*nftables.Set, []nftables.SetElement) error) error {
	var some []nftables.SetElement
	flush := func() error {
		if len(some) == 0 {
			return nil
		}
		err := errors.Join(write(set, some), t.conn.Flush())
		some = some[:0]
		return err
	}
	for key := range keys {
		if some = append(some, element(key)); len(some) == elementsAtOnce {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}
