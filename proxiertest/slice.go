package proxiertest

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SliceOption changes an EndpointSlice under construction.
type SliceOption func(*discovery.EndpointSlice)

// EndpointOption changes an endpoint under construction.
type EndpointOption func(*discovery.Endpoint)

// Slice builds an EndpointSlice of a Service, called "service-ipv4" or
// "service-ipv6", without ports and endpoints, and then applies the options in
// their order.
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

// SliceName renames the EndpointSlice, for a Service that has several.
func SliceName(name string) SliceOption {
	return func(s *discovery.EndpointSlice) { s.Name = name }
}

// SlicePort adds a port that all endpoints of the slice have.
func SlicePort(name string, protocol v1.Protocol, port int32) SliceOption {
	return func(s *discovery.EndpointSlice) {
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Protocol: &protocol, Port: &port})
	}
}

// Endpoint adds an endpoint that is ready and on no known node, and then applies
// the options to it.
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

// OnNode says which node an endpoint runs on.
func OnNode(name string) EndpointOption {
	return func(e *discovery.Endpoint) { e.NodeName = &name }
}

// InZone says which zone an endpoint runs in.
func InZone(name string) EndpointOption {
	return func(e *discovery.Endpoint) { e.Zone = &name }
}

// Terminating makes an endpoint one that is about to end but still serves.
func Terminating() EndpointOption {
	return func(e *discovery.Endpoint) { setConditions(e, false, true, true) }
}

// NotServing makes an endpoint one that takes no traffic.
func NotServing() EndpointOption {
	return func(e *discovery.Endpoint) { setConditions(e, false, false, false) }
}

func setConditions(e *discovery.Endpoint, ready, serving, terminating bool) {
	e.Conditions = discovery.EndpointConditions{
		Ready: &ready, Serving: &serving, Terminating: &terminating,
	}
}
