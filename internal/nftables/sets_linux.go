package nftables

import (
	"encoding/binary"
	"net/netip"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
	"golang.org/x/sys/unix"
)

// setID is one of the sets and maps of the layout. Their number is constant: all that
// changes with Services is elements.
type setID uint8

const (
	setServices setID = iota
	setNodePorts
	setFrontends
	setNodePortFrontends
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
	setEndpointCounters
	setNodePortEndpointCounters
	setAffinityEndpointCounters
	setFastVIPs
	setFastNodePorts
	setDirectVIPs
	setLimits
	setLimitClasses
	setRefused
	numSets
)

// setSpec is the shape of one set or map.
type setSpec struct {
	id    setID
	name  string
	key   []nft.Field
	data  []nft.Field // nil for a plain set
	extra uint32      // flags that do not follow from key and data
	jumps bool        // a verdict map: packets come back from its chains
	note  string      // what an element means, in one line
}

func (s *setSpec) verdict() string {
	if s.jumps {
		return "jump"
	}
	return "goto"
}

func (s *setSpec) flags() uint32 { return nft.SetFlags(s.key, s.data, s.extra) }

func (s *setSpec) isVerdictMap() bool { return len(s.data) > 0 && s.data[0] == nft.Verdict }

// What keys and data consist of.
var (
	addrField              = []nft.Field{nft.Addr}                                // read-only
	addrPairFields         = []nft.Field{nft.Addr, nft.Addr}                      // read-only
	markField              = []nft.Field{nft.Mark}                                // read-only
	verdictField           = []nft.Field{nft.Verdict}                             // read-only
	endpointFields         = []nft.Field{nft.Addr, nft.Port}                      // read-only
	vipFields              = []nft.Field{nft.Addr, nft.Proto, nft.Port}           // read-only
	vipAndIndexFields      = []nft.Field{nft.Addr, nft.Proto, nft.Port, nft.Mark} // read-only
	vipAndSourceFields     = []nft.Field{nft.Addr, nft.Proto, nft.Port, nft.Addr} // read-only
	nodePortFields         = []nft.Field{nft.Proto, nft.Port}                     // read-only
	nodePortAndIndexFields = []nft.Field{nft.Proto, nft.Port, nft.Mark}           // read-only
	nodePortToFields       = []nft.Field{nft.Proto, nft.Port, nft.Addr, nft.Port} // read-only
	recordFields           = []nft.Field{nft.Mark, nft.Addr}                      // read-only
)

// setSpecs is the shape of every set. A name stands for a shape and for the meaning of
// the elements, in all versions, because another version takes over the table while it
// is in use: whoever changes either renames the set.
var setSpecs = [numSets]setSpec{ // read-only
	setServices:                 {id: setServices, name: "services", key: vipFields, data: markField, note: "VIP to class"},
	setNodePorts:                {id: setNodePorts, name: "nodeports", key: nodePortFields, data: markField, note: "node port to class"},
	setFrontends:                {id: setFrontends, name: "frontends", key: vipFields, note: "every VIP of services: it stays while there is a class, whatever class that is"},
	setNodePortFrontends:        {id: setNodePortFrontends, name: "nodeport-frontends", key: nodePortFields, note: "the same for node ports"},
	setClasses:                  {id: setClasses, name: "classes", key: markField, data: verdictField, note: "class to chain"},
	setClusterIPs:               {id: setClusterIPs, name: "cluster-ips", key: addrField, note: "every ClusterIP: its other ports are rejected"},
	setServiceCIDRs:             {id: setServiceCIDRs, name: "service-cidrs", key: addrField, extra: unix.NFT_SET_INTERVAL, note: "ranges of ClusterIPs: addresses that are not in use are dropped"},
	setNodePortAddresses:        {id: setNodePortAddresses, name: "nodeport-addresses", key: addrField, extra: unix.NFT_SET_INTERVAL, note: "local addresses that accept node ports"},
	setPodCIDRs:                 {id: setPodCIDRs, name: "pod-cidrs", key: addrField, extra: unix.NFT_SET_INTERVAL, note: "sources that count as pods"},
	setFirewalled:               {id: setFirewalled, name: "firewalled", key: vipFields, data: markField, note: "VIP with source ranges or a client limit to class, behind these"},
	setFirewalledClasses:        {id: setFirewalledClasses, name: "firewalled-classes", key: markField, data: verdictField, note: "class to chain, behind source ranges and client limits"},
	setSourceRanges:             {id: setSourceRanges, name: "source-ranges", key: vipAndSourceFields, extra: unix.NFT_SET_INTERVAL, note: "VIP and the sources it admits"},
	setLocals:                   {id: setLocals, name: "locals", key: vipFields, data: markField, note: "VIP with external policy Local to class, for external traffic"},
	setNodePortLocals:           {id: setNodePortLocals, name: "nodeport-locals", key: nodePortFields, data: markField, note: "the same for node ports"},
	setLocalClasses:             {id: setLocalClasses, name: "local-classes", key: markField, data: verdictField, note: "class to chain, for external traffic"},
	setShortCircuits:            {id: setShortCircuits, name: "short-circuits", key: vipFields, data: markField, note: "VIP with external policy Local to class, for pods and the node"},
	setNodePortShortCircuits:    {id: setNodePortShortCircuits, name: "nodeport-short-circuits", key: nodePortFields, data: markField, note: "the same for node ports"},
	setShortCircuitClasses:      {id: setShortCircuitClasses, name: "short-circuit-classes", key: markField, data: verdictField, note: "class to chain, for pods and the node"},
	setEndpoints:                {id: setEndpoints, name: "endpoints", key: vipAndIndexFields, data: endpointFields, note: "VIP and index to endpoint"},
	setNodePortEndpoints:        {id: setNodePortEndpoints, name: "nodeport-endpoints", key: nodePortAndIndexFields, data: endpointFields, note: "node port and index to endpoint"},
	setHairpin:                  {id: setHairpin, name: "hairpin", key: addrPairFields, note: "endpoints that may be on this node, as source and destination"},
	setHealthPorts:              {id: setHealthPorts, name: "health-ports", key: nodePortFields, note: "health check ports that the node serves at VIPs: only in front of another engine"},
	setAffinityKeys:             {id: setAffinityKeys, name: "affinity-keys", key: vipFields, data: markField, note: "VIP to the affinity id of its service port, and its timeout"},
	setNodePortAffinityKeys:     {id: setNodePortAffinityKeys, name: "nodeport-affinity-keys", key: nodePortFields, data: markField, note: "the same for node ports"},
	setAffinityTimeouts:         {id: setAffinityTimeouts, name: "affinity-timeouts", key: markField, data: verdictField, jumps: true, note: "timeout to the chain that sets it in a record"},
	setAffinityCounts:           {id: setAffinityCounts, name: "affinity-counts", key: markField, data: markField, note: "affinity id and scope to the class that draws one of their endpoints"},
	setAffinityDraws:            {id: setAffinityDraws, name: "affinity-draws", key: markField, data: verdictField, jumps: true, note: "class to the chain that draws an endpoint"},
	setAffinityPicks:            {id: setAffinityPicks, name: "affinity-picks", key: vipAndIndexFields, data: markField, note: "VIP and index to affinity endpoint id"},
	setNodePortAffinityPicks:    {id: setNodePortAffinityPicks, name: "nodeport-affinity-picks", key: nodePortAndIndexFields, data: markField, note: "the same for node ports"},
	setAffinityEndpoints:        {id: setAffinityEndpoints, name: "affinity-endpoints", key: markField, data: endpointFields, note: "affinity endpoint id to endpoint"},
	setAffinity:                 {id: setAffinity, name: "affinity", key: recordFields, data: markField, extra: unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, note: "written by packets: affinity id and client to affinity endpoint id"},
	setEndpointCounters:         {id: setEndpointCounters, name: "endpoint-counters", key: vipAndIndexFields, extra: unix.NFT_SET_EVAL, note: "written by packets: connections by VIP and index, if they are counted"},
	setNodePortEndpointCounters: {id: setNodePortEndpointCounters, name: "nodeport-endpoint-counters", key: nodePortAndIndexFields, extra: unix.NFT_SET_EVAL, note: "the same for node ports"},
	setAffinityEndpointCounters: {id: setAffinityEndpointCounters, name: "affinity-endpoint-counters", key: markField, extra: unix.NFT_SET_EVAL, note: "written by packets: connections by affinity endpoint id, if they are counted"},
	setFastVIPs:                 {id: setFastVIPs, name: "fast-vips", key: vipFields, note: "VIP of which established connections take the fast path"},
	setFastNodePorts:            {id: setFastNodePorts, name: "fast-nodeports", key: nodePortToFields, note: "the same for node ports, with each endpoint: an address of others may have the port"},
	setDirectVIPs:               {id: setDirectVIPs, name: "direct-vips", key: vipFields, note: "VIP whose packets are forwarded unchanged, so that the node sees no answers: only in front of another engine"},
	setLimits:                   {id: setLimits, name: "client-limits", key: vipFields, data: markField, note: "VIP with a client limit to the class that limits: only with client limits, as the next ones"},
	setLimitClasses:             {id: setLimitClasses, name: "limit-classes", key: markField, data: verdictField, jumps: true, note: "class to the chain that refuses clients above a limit"},
	setRefused:                  {id: setRefused, name: "refused", key: vipFields, extra: unix.NFT_SET_EVAL, note: "written by packets: connections above client limits by VIP, if connections are counted"},
}

// elementBytes is the key or the data of an element, as the kernel expects it. The longest
// is a VIP with a source range: 16 + 4 + 4 + 16 bytes.
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

// mark appends a number in the machine's byte order, as packet marks have it.
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

// forKind returns the map of VIPs, or the same map for node ports.
func forKind(k desired.Key, vip, nodePort setID) setID {
	if k.VIP.IsValid() {
		return vip
	}
	return nodePort
}

func setName(id setID) string { return setSpecs[id].name }

func setNamed(name string) *setSpec {
	for i := range setSpecs {
		if setSpecs[i].name == name {
			return &setSpecs[i]
		}
	}
	return &setSpec{}
}

// has reports whether a table with these rules has a set.
func (r *rules) has(s *setSpec) bool {
	switch s.id {
	case setLimits, setLimitClasses:
		return r.limits
	case setRefused:
		return r.limits && r.counts
	default:
		return true
	}
}
