// Package programmed says which changes of the API server a node has programmed, and waits until
// all nodes have one. It is for controllers and hooks that must know when all nodes have followed:
// preStop hooks, readiness gates, deployments.
//
// A pod that ends must not close its sockets before the last node has stopped sending
// connections to it. Nobody could tell when that is, so pods wait: a preStop hook with
// "sleep 15" (kubernetes/kubernetes#43576, KEP-3960). A proxy knows the resourceVersions that
// it has received, and what is in its kernel:
//
//	http.Handle("/programmed", programmed.Handler(node, proxy)) // on each node
//
//	err := programmed.Wait(ctx, programmed.Waiting{Nodes: nodes, Ask: programmed.OverHTTP(http.DefaultClient, address)}, programmed.ServiceChange{
//		Service:  service,
//		Versions: changetracker.Versions{EndpointSlices: slice.ResourceVersion},
//	})
//
// Package informer's Run gives a Provider the versions; a program with another source calls
// OnVersion of the Provider. Versions are compared as in KEP-5504: decimal numbers of any
// length, of one resource of one API server.
package programmed
