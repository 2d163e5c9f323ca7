package proxiertest

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SliceOption is an argument of Slice.
type SliceOption func(*discovery.EndpointSlice)

// EndpointOption is an argument of Endpoint.
type EndpointOption func(*discovery.Endpoint)

// Slice returns an EndpointSlice of a Service, with the name "service-ipv4" or
// "service-ipv6" and without ports and endpoints, to which it applies the options in order.
func Slice(namespace, service string, family discovery.AddressType, opts ...SliceOption) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace,
			Name:      service + "-" + strings.ToLower(string(family)),
			Labels:    map[string]string{discovery.LabelServiceName: service},
		},
		AddressType: family,
	}
	for _, opt := range opts {
		opt(s)
	}
	return s
}

// SliceName sets the name, for a Service with several EndpointSlices.
func SliceName(name string) SliceOption {
	return func(s *discovery.EndpointSlice) { s.Name = name }
}

// SlicePort adds a port of all endpoints.
func SlicePort(name string, protocol v1.Protocol, port int32) SliceOption {
	return func(s *discovery.EndpointSlice) {
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Protocol: &protocol, Port: &port})
	}
}

// Endpoint adds a ready endpoint without a node name, to which it applies the options in
// order.
func Endpoint(address string, opts ...EndpointOption) SliceOption {
	return func(s *discovery.EndpointSlice) {
		endpoint := discovery.Endpoint{Addresses: []string{address}}
		setConditions(&endpoint, true, true, false)
		for _, opt := range opts {
			opt(&endpoint)
		}
		s.Endpoints = append(s.Endpoints, endpoint)
	}
}

// OnNode sets the node name.
func OnNode(name string) EndpointOption {
	return func(e *discovery.Endpoint) { e.NodeName = &name }
}

// InZone sets the zone.
func InZone(name string) EndpointOption {
	return func(e *discovery.Endpoint) { e.Zone = &name }
}

// Terminating makes an endpoint terminating, serving and not ready.
func Terminating() EndpointOption {
	return func(e *discovery.Endpoint) { setConditions(e, false, true, true) }
}

// NotServing makes an endpoint neither ready nor serving.
func NotServing() EndpointOption {
	return func(e *discovery.Endpoint) { setConditions(e, false, false, false) }
}

func setConditions(e *discovery.Endpoint, ready, serving, terminating bool) {
	e.Conditions = discovery.EndpointConditions{
		Ready: &ready, Serving: &serving, Terminating: &terminating,
	}
}
