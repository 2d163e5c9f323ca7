package changetracker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
)

func (p *ServicePort) clone() *ServicePort {
	c := *p
	c.ExternalIPs = slices.Clone(p.ExternalIPs)
	c.LoadBalancerVIPs = slices.Clone(p.LoadBalancerVIPs)
	c.LoadBalancerSourceRanges = slices.Clone(p.LoadBalancerSourceRanges)
	return &c
}

// canonicalise validates values that did not come from our own parser and brings
// them into canonical form. It changes the lists in place. The error names every
// fault, and means that p must not be used.
func (p *ServicePort) canonicalise() error {
	var faults []error
	fault := func(field string, value any) {
		faults = append(faults, fmt.Errorf("%s: invalid value %v", field, value))
	}
	if !validProtocol(p.Name.Protocol) {
		fault("Name.Protocol", p.Name.Protocol)
	}
	if p.ClusterIP = p.ClusterIP.Unmap(); !dialable(p.ClusterIP) {
		fault("ClusterIP", p.ClusterIP)
	}
	if p.Port == 0 {
		fault("Port", p.Port)
	}
	if p.SessionAffinity < 0 {
		fault("SessionAffinity", p.SessionAffinity)
	}
	for i, a := range p.ExternalIPs {
		if p.ExternalIPs[i] = a.Unmap(); !p.fits(a) {
			fault("ExternalIPs", a)
		}
	}
	for i, a := range p.LoadBalancerVIPs {
		if p.LoadBalancerVIPs[i] = a.Unmap(); !p.fits(a) {
			fault("LoadBalancerVIPs", a)
		}
	}
	for i, r := range p.LoadBalancerSourceRanges {
		p.LoadBalancerSourceRanges[i] = canonicalPrefix(r)
		if !r.IsValid() || addrFamily(p.LoadBalancerSourceRanges[i].Addr()) != addrFamily(p.ClusterIP) {
			fault("LoadBalancerSourceRanges", r)
		}
	}
	p.CreationTimestamp = p.CreationTimestamp.Round(0).UTC()
	p.ExternalIPs = canonicalAddrs(p.ExternalIPs)
	p.LoadBalancerVIPs = canonicalAddrs(p.LoadBalancerVIPs)
	p.LoadBalancerSourceRanges = canonicalPrefixes(p.LoadBalancerSourceRanges)
	return errors.Join(faults...)
}

// fits says that a can be a VIP beside the cluster IP.
func (p *ServicePort) fits(a netip.Addr) bool {
	return dialable(a.Unmap()) && addrFamily(a.Unmap()) == addrFamily(p.ClusterIP)
}

func validProtocol(p v1.Protocol) bool {
	return p == v1.ProtocolTCP || p == v1.ProtocolUDP || p == v1.ProtocolSCTP
}

// canonicalise validates a hand-built endpoint and makes it our own.
func (e *Endpoint) canonicalise() error {
	e.Addr = netip.AddrPortFrom(e.Addr.Addr().Unmap(), e.Addr.Port())
	if !dialable(e.Addr.Addr()) || e.Addr.Port() == 0 {
		return fmt.Errorf("endpoint address: invalid value %v", e.Addr)
	}
	e.ZoneHints = slices.Clone(canonicalNames(e.ZoneHints))
	e.NodeHints = slices.Clone(canonicalNames(e.NodeHints))
	return nil
}

// rank orders the records of one address by their conditions (W-04): ready first, then serving while terminating, then the rest; among these what is not
// terminating (EPS-19), then what serves.
func (e *Endpoint) rank() int {
	rank := 0
	switch {
	case e.Ready:
		rank = 8
	case e.Usable():
		rank = 4
	}
	if !e.Terminating {
		rank += 2
	}
	if e.Serving {
		rank++
	}
	return rank
}
