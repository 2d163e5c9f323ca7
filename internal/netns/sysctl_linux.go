package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
)

// setting is a kernel parameter; the name is a path below /proc/sys.
type setting struct{ name, value string }

// setUp sets the kernel parameters of the calling thread's namespace, and brings
// loopback up.
func setUp() error {
	// New links copy their settings from "default".
	settings := []setting{
		{"net/ipv6/conf/default/accept_dad", "0"}, // otherwise addresses are unusable for a second
		{"net/ipv6/conf/all/accept_dad", "0"},
		{"net/ipv6/conf/default/accept_ra", "0"},
		{"net/ipv4/conf/default/rp_filter", "0"}, // the host's may be strict, and is inherited
		{"net/ipv4/conf/all/rp_filter", "0"},
		{"net/ipv4/icmp_ratemask", "0"},   // otherwise no seventh port unreachable is sent
		{"net/ipv6/icmp/ratemask", "128"}, // limits only echo requests: no value limits nothing
	}
	for _, s := range settings {
		// Without IPv6, for example, its parameters do not exist.
		if err := write([]setting{s}); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := netlink.LinkSetUp(device("lo")); err != nil {
		return fmt.Errorf("set link lo up: %w", err)
	}
	return nil
}

// SetSysctl sets a kernel parameter of the namespace. The name is a path below
// /proc/sys, "net/ipv4/ip_forward".
func (n *NS) SetSysctl(name, value string) error {
	return n.Do(func() error { return write([]setting{{name, value}}) })
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
	return n.Do(func() error {
		return write([]setting{{"net/ipv4/ip_forward", "1"}, {"net/ipv6/conf/all/forwarding", "1"}})
	})
}

// write must run on a thread inside the namespace: /proc/sys/net belongs to the namespace
// of the thread that opens a file.
func write(settings []setting) error {
	for _, s := range settings {
		if err := os.WriteFile(filepath.Join("/proc/sys", s.name), []byte(s.value), 0); err != nil {
			return fmt.Errorf("set sysctl to %q: %w", s.value, privilege(err))
		}
	}
	return nil
}
