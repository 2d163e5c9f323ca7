package ebpf_test

import (
	"fmt"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/proxier"
)

// Sockets of pods are translated before any packet, and rules serve all others. A Service with an annotation is left
// to the rules. A program that lacks a field gets an error that names it.
func ExampleNewEngine() {
	config := ebpf.Config{Sockets: ebpf.Sockets{
		Cgroups: []string{"/sys/fs/cgroup/kubepods.slice"},
		Choose:  func(s *desired.Service) bool { return s.Port.Ext != "rules" },
	}}
	fmt.Println(config.Validate())
	config.Sockets.Cgroups = nil
	_, err := ebpf.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	fmt.Println(err)
	// Output:
	// <nil>
	// invalid configuration: Sockets.Cgroups: empty: want at least one directory of cgroup v2
}
