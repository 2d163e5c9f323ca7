package main

import (
	"net/netip"

	v1 "k8s.io/api/core/v1"
)

// refusing are endpoints on this node that refuse connections: a TCP connection gets a reset, a
// datagram an ICMP port unreachable. The Gateway API wants it so: if a backend with 3 of 10
// parts of the weight is missing, 3 of 10 connections are refused.
type refusing map[socketKind]netip.AddrPort

type socketKind struct {
	protocol v1.Protocol
	family   v1.IPFamily
}

func (r refusing) endpoint(protocol v1.Protocol, family v1.IPFamily) netip.AddrPort {
	return r[socketKind{protocol, family}]
}
