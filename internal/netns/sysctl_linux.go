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

// setting is one line of sysctl.conf, with the name as a path.
type setting struct{ name, value string }

// setUp turns the namespace of the calling thread from bare to usable.
func setUp() error {
	// New links copy their settings from "default".
	settings := []setting{
		{"net/ipv6/conf/default/accept_dad", "0"}, // else addresses are unusable for a second
		{"net/ipv6/conf/all/accept_dad", "0"},
		{"net/ipv6/conf/default/accept_ra", "0"},
		{"net/ipv4/conf/default/rp_filter", "0"}, // hosts may hand down a strict one
		{"net/ipv4/conf/all/rp_filter", "0"},
		{"net/ipv4/icmp_ratemask", "0"},   // else the seventh port unreachable is a timeout
		{"net/ipv6/icmp/ratemask", "128"}, // echo requests alone: it has no word for none
	}
	for _, s := range settings {
		// What is missing, IPv6 for one, does no harm before somebody needs it.
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

// Forward makes a router of the namespace, for both families.
func (n *NS) Forward() error {
	return n.Do(func() error {
		return write([]setting{{"net/ipv4/ip_forward", "1"}, {"net/ipv6/conf/all/forwarding", "1"}})
	})
}

// write must run on a thread inside the namespace: /proc/sys/net shows the one of
// the thread that opens it.
func write(settings []setting) error {
	for _, s := range settings {
		if err := os.WriteFile(filepath.Join("/proc/sys", s.name), []byte(s.value), 0); err != nil {
			return fmt.Errorf("set sysctl to %q: %w", s.value, privilege(err))
		}
	}
	return nil
}
