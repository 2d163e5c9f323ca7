// Kubernetes is a program with the types that this module reads, and nothing of this module. A program with
// parts of this module is larger.
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
