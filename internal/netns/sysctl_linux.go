package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// setUp sets the kernel parameters of the calling thread's namespace, and brings
// loopback up.
func setUp() error {
	// New links copy their settings from "default".
	for _, s := range [][2]string{
		{"net/ipv6/conf/default/accept_dad", "0"}, // otherwise addresses are unusable for a second
		{"net/ipv6/conf/all/accept_dad", "0"},
		{"net/ipv6/conf/default/accept_ra", "0"},
		{"net/ipv4/conf/default/rp_filter", "0"}, // the host's may be strict, and is inherited
		{"net/ipv4/conf/all/rp_filter", "0"},
		{"net/ipv4/icmp_ratemask", "0"},   // otherwise no seventh port unreachable is sent
		{"net/ipv6/icmp/ratemask", "128"}, // limits only echo requests: no value limits nothing
	} {
		// Without IPv6, for example, its parameters do not exist.
		if err := write(s[0], s[1]); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return setLinkUp(device("lo"))
}

// SetSysctl sets a kernel parameter of the namespace. The name is a path below
// /proc/sys, "net/ipv4/ip_forward".
func (n *NS) SetSysctl(name, value string) error {
	return n.Do(func() error { return write(name, value) })
}

// Sysctl reads a kernel parameter of the namespace, without surrounding space.
func (n *NS) Sysctl(name string) (value string, err error) {
	err = n.Do(func() error {
		text, err := os.ReadFile(filepath.Join("/proc/sys", name))
		if err != nil {
			return fmt.Errorf("read sysctl: %w", err)
		}
		value = strings.TrimSpace(string(text))
		return nil
	})
	return value, err
}

// Forward enables forwarding, for both IP families.
func (n *NS) Forward() error {
	if err := n.SetSysctl("net/ipv4/ip_forward", "1"); err != nil {
		return err
	}
	return n.SetSysctl("net/ipv6/conf/all/forwarding", "1")
}

// write must run on a thread inside the namespace: /proc/sys/net belongs to the namespace
// of the thread that opens a file.
func write(name, value string) error {
	if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl to %q: %w", value, privilege(err))
	}
	return nil
}
