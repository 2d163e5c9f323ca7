// Package cluster asks an API server what package programmed needs: which nodes there are, and
// which EndpointSlices have a pod. For clusters whose nodes cannot be dialled, nodes say what they
// have programmed in Leases. It is for hooks and controllers in a cluster.
//
//	client, err := cluster.New(config)
//	waiting := client.Dial(cluster.NodeOptions{}) // asks /programmed of each node
//	err = client.WaitUntilLeft(ctx, pod, waiting)
//
// docs/PROGRAMMED.md shows what it costs.
package cluster
