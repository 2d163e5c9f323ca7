package nftables

import (
	"encoding/binary"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
)

// setID names one of the sets and maps of the layout. Their number is constant:
// everything that changes with Services is an element.
type setID uint8

const (
	setServices setID = iota
	setNodePorts
	setClasses
	setClusterIPs
	setServiceCIDRs
	setNodePortAddresses
	setPodCIDRs
	setFirewalled
	setFirewalledClasses
	setSourceRanges
	setLocals
	setNodePortLocals
	setLocalClasses
	setShortCircuits
	setNodePortShortCircuits
	setShortCircuitClasses
	setEndpoints
	setNodePortEndpoints
	setHairpin
	setHealthPorts
	setAffinityKeys
	setNodePortAffinityKeys
	setAffinityTimeouts
	setAffinityCounts
	setAffinityDraws
	setAffinityPicks
	setNodePortAffinityPicks
	setAffinityEndpoints
	setAffinity
	numSets
)

// field is one component of a set's key or data.
type field uint8

const (
	fieldAddr field = iota + 1
	fieldProto
	fieldPort
	fieldMark
	fieldVerdict
)

// Flags of a set, NFT_SET_* of linux/netfilter/nf_tables.h.
const (
	flagAnonymous = 0x01
	flagInterval  = 0x04
	flagMap       = 0x08
	flagTimeout   = 0x10
	flagEval      = 0x20
	flagConcat    = 0x80
)

// flagDormant is NFT_TABLE_F_DORMANT: the chains of the table have no hooks.
const flagDormant = 0x01

// setSpec is the shape of one set or map.
type setSpec struct {
	id    setID
	name  string
	key   []field
	data  []field // nil for a plain set
	flags uint32
	jumps bool   // a verdict map: packets come back from its chains
	note  string // what an element means, in one line
}

func (s *setSpec) verdict() string {
	if s.jumps {
		return "jump"
	}
	return "goto"
}

func (s *setSpec) isVerdictMap() bool { return len(s.data) > 0 && s.data[0] == fieldVerdict }

// setSpecs returns the shape of every set, indexed by setID. A name stands for
// its shape and for what the elements mean, once and for all, because a table
// stays in use while another version takes it over: who changes either gives the
// set a new name.
func setSpecs() []setSpec {
	tuple := []field{fieldAddr, fieldProto, fieldPort}
	nodePort := []field{fieldProto, fieldPort}
	mark, verdict, addr := []field{fieldMark}, []field{fieldVerdict}, []field{fieldAddr}
	endpoint := []field{fieldAddr, fieldPort}
	tupleAnd := func(f field) []field { return []field{fieldAddr, fieldProto, fieldPort, f} }
	nodePortAnd := func(f field) []field { return []field{fieldProto, fieldPort, f} }

	specs := []setSpec{
		{id: setServices, name: "services", key: tuple, data: mark, note: "VIP to class"},
		{id: setNodePorts, name: "nodeports", key: nodePort, data: mark, note: "node port to class"},
		{id: setClasses, name: "classes", key: mark, data: verdict, note: "class to chain"},
		{id: setClusterIPs, name: "cluster-ips", key: addr, note: "every ClusterIP: its other ports are rejected"},
		{id: setServiceCIDRs, name: "service-cidrs", key: addr, flags: flagInterval, note: "where ClusterIPs come from: the rest of it is dropped"},
		{id: setNodePortAddresses, name: "nodeport-addresses", key: addr, flags: flagInterval, note: "local addresses that accept node ports"},
		{id: setPodCIDRs, name: "pod-cidrs", key: addr, flags: flagInterval, note: "sources that count as pods"},
		{id: setFirewalled, name: "firewalled", key: tuple, data: mark, note: "VIP with source ranges to class"},
		{id: setFirewalledClasses, name: "firewalled-classes", key: mark, data: verdict, note: "class to chain, behind the source ranges"},
		{id: setSourceRanges, name: "source-ranges", key: tupleAnd(fieldAddr), flags: flagInterval, note: "VIP and the sources it admits"},
		{id: setLocals, name: "locals", key: tuple, data: mark, note: "VIP with external policy Local to class, for outside traffic"},
		{id: setNodePortLocals, name: "nodeport-locals", key: nodePort, data: mark, note: "the same for node ports"},
		{id: setLocalClasses, name: "local-classes", key: mark, data: verdict, note: "class to chain, for outside traffic"},
		{id: setShortCircuits, name: "short-circuits", key: tuple, data: mark, note: "VIP with external policy Local to class, for pods and the node"},
		{id: setNodePortShortCircuits, name: "nodeport-short-circuits", key: nodePort, data: mark, note: "the same for node ports"},
		{id: setShortCircuitClasses, name: "short-circuit-classes", key: mark, data: verdict, note: "class to chain, for pods and the node"},
		{id: setEndpoints, name: "endpoints", key: tupleAnd(fieldMark), data: endpoint, note: "VIP and index to endpoint"},
		{id: setNodePortEndpoints, name: "nodeport-endpoints", key: nodePortAnd(fieldMark), data: endpoint, note: "node port and index to endpoint"},
		{id: setHairpin, name: "hairpin", key: []field{fieldAddr, fieldAddr}, note: "endpoints that may be on this node, as source and destination"},
		{id: setHealthPorts, name: "health-ports", key: nodePort, note: "where the node answers at VIPs that it has: only for an engine behind this one"},
		{id: setAffinityKeys, name: "affinity-keys", key: tuple, data: mark, note: "VIP to the affinity id of its service port, and its timeout"},
		{id: setNodePortAffinityKeys, name: "nodeport-affinity-keys", key: nodePort, data: mark, note: "the same for node ports"},
		{id: setAffinityTimeouts, name: "affinity-timeouts", key: mark, data: verdict, jumps: true, note: "timeout to the chain that makes a record last as long"},
		{id: setAffinityCounts, name: "affinity-counts", key: mark, data: mark, note: "affinity id and scope to class of endpoints to draw from"},
		{id: setAffinityDraws, name: "affinity-draws", key: mark, data: verdict, jumps: true, note: "class to the chain that draws"},
		{id: setAffinityPicks, name: "affinity-picks", key: tupleAnd(fieldMark), data: mark, note: "VIP and index to affinity endpoint id"},
		{id: setNodePortAffinityPicks, name: "nodeport-affinity-picks", key: nodePortAnd(fieldMark), data: mark, note: "the same for node ports"},
		{id: setAffinityEndpoints, name: "affinity-endpoints", key: mark, data: endpoint, note: "affinity endpoint id to endpoint"},
		{id: setAffinity, name: "affinity", key: []field{fieldMark, fieldAddr}, data: mark, flags: flagTimeout | flagEval, note: "written by packets: affinity id and client to affinity endpoint id"},
	}
	for i := range specs {
		if len(specs[i].key) > 1 {
			specs[i].flags |= flagConcat
		}
		if specs[i].data != nil {
			specs[i].flags |= flagMap
		}
	}
	return specs
}

// fieldLen is the length of a field in a key, before padding to 4 bytes.
func fieldLen(f field, addrLen int) int {
	switch f {
	case fieldAddr:
		return addrLen
	case fieldProto:
		return 1
	case fieldPort:
		return 2
	case fieldMark:
		return 4
	case fieldVerdict:
		return 16 // sizeof(struct nft_verdict)
	default:
		return 0
	}
}

// padded is the length of fields concatenated in registers of 4 bytes.
func padded(fields []field, addrLen int) int {
	n := 0
	for _, f := range fields {
		n += (fieldLen(f, addrLen) + 3) &^ 3
	}
	return n
}

// elementBytes holds the key or the data of an element in the kernel's form. The
// longest is a VIP with a source range: 16 + 4 + 4 + 16 bytes.
type elementBytes struct {
	n   uint8
	buf [40]byte
}

// bytes is nil for no bytes at all.
func (e *elementBytes) bytes() []byte {
	if e.n == 0 {
		return nil
	}
	return e.buf[:e.n]
}

func (e elementBytes) addr(a netip.Addr) elementBytes {
	if a.Is4() {
		b := a.As4()
		e.n += uint8(copy(e.buf[e.n:], b[:]))
		return e
	}
	b := a.As16()
	e.n += uint8(copy(e.buf[e.n:], b[:]))
	return e
}

func (e elementBytes) proto(p desired.Protocol) elementBytes {
	e.buf[e.n] = byte(p)
	e.n += 4
	return e
}

func (e elementBytes) port(p uint16) elementBytes {
	binary.BigEndian.PutUint16(e.buf[e.n:], p)
	e.n += 4
	return e
}

// mark appends a number in the byte order of packet marks: the machine's.
func (e elementBytes) mark(m uint32) elementBytes {
	binary.NativeEndian.PutUint32(e.buf[e.n:], m)
	e.n += 4
	return e
}

// frontendKey is the key of a frontend in the maps of its kind.
func frontendKey(k desired.Key) elementBytes {
	var e elementBytes
	if k.VIP.IsValid() {
		e = e.addr(k.VIP)
	}
	return e.proto(k.Protocol).port(k.Port)
}

func addrPortData(ap netip.AddrPort) elementBytes {
	return elementBytes{}.addr(ap.Addr()).port(ap.Port())
}

func markData(m uint32) elementBytes { return elementBytes{}.mark(m) }

// forKind picks the map of VIPs or its twin for node ports.
func forKind(k desired.Key, vip, nodePort setID) setID {
	if k.VIP.IsValid() {
		return vip
	}
	return nodePort
}

// setName is the name of a set in the table.
func setName(id setID) string { return setSpecs()[id].name }
