// Package vectors has test vectors for the choice of endpoints, for every program that decides which
// endpoints of a Service a node sends to: a Service, its EndpointSlices, and what three nodes do with them,
// with the reason for each endpoint that is left out. They are JSON, and belong to no implementation;
// README.md has the format. The package needs the standard library alone.
package vectors

import (
	_ "embed"
	"encoding/json"
	"fmt"
)

// v1 is version 1 of the vectors. Vectors may be added to it; a change of the format, or of what is wanted, makes
// another version.
//
//go:embed v1.json
var v1 []byte // read-only

// Node is a node; its Zone, in the label topology.kubernetes.io/zone, may be empty.
type Node struct {
	Name string `json:"name"`
	Zone string `json:"zone,omitempty"`
}

// Vector is a Service with its EndpointSlices, and what the nodes do.
type Vector struct {
	Name string `json:"name"`
	// Source is the rule: a KEP or a field of the API.
	Source         string            `json:"source"`
	Service        json.RawMessage   `json:"service"`
	EndpointSlices []json.RawMessage `json:"endpointSlices"`
	Want           []Want            `json:"want"`
}

// Want is what a node does with a port of the Service, in an IP family.
type Want struct {
	Node     string `json:"node"`
	Port     string `json:"port"`
	Protocol string `json:"protocol"`
	Family   string `json:"family"`
	// Internal is for connections to the ClusterIP, External for those that come from outside to the node port.
	Internal Chosen `json:"internal"`
	External Chosen `json:"external"`
}

// Chosen is the set of endpoints that new connections get.
type Chosen struct {
	// Action is forward, or without Endpoints reject, or drop if only other nodes have some.
	Action string `json:"action"`
	// Endpoints are addresses with ports, sorted as text.
	Endpoints []string `json:"endpoints,omitempty"`
	// LeftOut has the reason for each other endpoint: not-ready, not-serving, elsewhere, draining, node-hint or zone-hint.
	LeftOut map[string]string `json:"leftOut,omitempty"`
}

// Load returns the vectors, and the nodes that they are about. They are a copy of the caller's own.
func Load() ([]Node, []Vector, error) {
	var s struct {
		Nodes   []Node   `json:"nodes"`
		Vectors []Vector `json:"vectors"`
	}
	if err := json.Unmarshal(v1, &s); err != nil {
		return nil, nil, fmt.Errorf("read v1.json: %w", err)
	}
	return s.Nodes, s.Vectors, nil
}
