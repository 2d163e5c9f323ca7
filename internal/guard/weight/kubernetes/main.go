// Kubernetes is a program with the types that this module reads, and nothing of this module: what no
// program with parts of it can be below.
package main

import (
	"fmt"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

func main() {
	fmt.Println(v1.Service{}, discovery.EndpointSlice{}, zap.NewNop())
}
