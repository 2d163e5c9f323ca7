package ebpf

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// privileged names the capabilities (linux/capability.h) that the process lacks, of these and CAP_NET_ADMIN.
func privileged(capabilities ...int) error {
	var names []string
	var have [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &have[0]); err != nil {
		return fmt.Errorf("read the capabilities of the process: %w", err)
	}
	has := func(capability int) bool { return have[capability/32].Effective&(1<<(capability%32)) != 0 }
	for _, c := range append([]int{unix.CAP_NET_ADMIN}, capabilities...) {
		if !has(c) && (c == unix.CAP_NET_ADMIN || !has(unix.CAP_SYS_ADMIN)) { // which includes the others
			names = append(names, capabilityNames()[c])
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%w: the process lacks %s: add it to the capabilities of its container or service", errUnavailable, strings.Join(names, " and "))
}

func capabilityNames() map[int]string {
	return map[int]string{unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_BPF: "CAP_BPF", unix.CAP_PERFMON: "CAP_PERFMON", unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN"}
}

// capability is what sockets need beside CAP_NET_ADMIN: to enter network namespaces, where UDP sockets end,
// needs more.
func (s *Sockets) capability() int {
	if s.UDP {
		return unix.CAP_SYS_ADMIN
	}
	return unix.CAP_BPF
}
