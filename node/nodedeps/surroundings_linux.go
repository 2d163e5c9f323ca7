package nodedeps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// Surroundings returns a function for proxier.Deps.Surroundings, on the node of config. It finds settings that
// other programs and administrators may change at any time:
//
//   - an IP family that the kernel does not forward (net.ipv4.ip_forward,
//     net.ipv6.conf.all.forwarding): only endpoints on the node are reached;
//   - a bridge with addresses of pods, if packets on it do not meet the rules (net.bridge.bridge-nf-call-iptables,
//     -ip6tables, module br_netfilter): if a pod's connection to a Service leads to another pod of the
//     bridge, the answer goes there directly, from an address that the client does not know, and the
//     connection times out. Pods are those in Masquerade.PodCIDRs and in the PodCIDRs of the Node;
//   - a strict reverse path filter (net.ipv4.conf.DEVICE.rp_filter) that has dropped ten packets or more since
//     the last call.
//
// An IP family counts if there are ranges of pods in it; if there are none at all, the family of the Node's first
// address does. What cannot be read is not found. On other systems than Linux nothing is.
func Surroundings(config proxier.Config) func(ctx context.Context, node changetracker.Node) []proxier.Condition {
	config = config.WithDefaults()
	var mu sync.Mutex // guards filter
	var filter pathFilter
	return func(_ context.Context, node changetracker.Node) (all []proxier.Condition) {
		pods := slices.Concat(config.Masquerade.PodCIDRs, node.PodCIDRs)
		bridges := bridges(config.NetNS, pods)
		_ = namespace.Visit(config.NetNS, func() error {
			for _, family := range config.Families {
				if !isUsed(family, pods, node.Addresses) {
					continue
				}
				messages := found(settings[family], bridges[family])
				if family == v1.IPv4Protocol {
					mu.Lock()
					if dropped := filter.found(); dropped != "" {
						messages = append(messages, dropped)
					}
					mu.Unlock()
				}
				for _, message := range messages {
					all = append(all, proxier.Condition{Type: proxier.ConditionForwarding, Family: family, Message: message, Since: time.Now()})
				}
			}
			return nil
		})
		return all
	}
}

// isUsed reports whether a cluster with such pods, on a node with such addresses, uses an IP family.
func isUsed(family v1.IPFamily, pods []netip.Prefix, addrs []netip.Addr) bool {
	four := family == v1.IPv4Protocol
	if len(pods) == 0 {
		return len(addrs) > 0 && addrs[0].Is4() == four
	}
	return slices.ContainsFunc(pods, func(p netip.Prefix) bool { return p.Addr().Is4() == four })
}

// found tells what is wrong for a family with bridges of pods, in the network namespace of the thread.
func found(of names, bridges []string) (messages []string) {
	if value, err := read(of.forward); err == nil && value == "0" {
		messages = append(messages, of.forward+" is 0: packets do not reach endpoints on other nodes, nor pods: set it to 1")
	}
	if len(bridges) == 0 {
		return messages
	}
	value, err := read(of.bridge)
	if errors.Is(err, fs.ErrNotExist) {
		value, err = "missing", nil
	}
	if err == nil && value != "1" {
		messages = append(messages, fmt.Sprintf("%s is %s: connections between pods of bridge %s through a Service time out: load module br_netfilter, and set it to 1",
			of.bridge, value, strings.Join(bridges, ", ")))
	}
	return messages
}

// names are those of settings of a family.
type names struct{ forward, bridge string }

var settings = map[v1.IPFamily]names{ // read-only
	v1.IPv4Protocol: {"net.ipv4.ip_forward", "net.bridge.bridge-nf-call-iptables"},
	v1.IPv6Protocol: {"net.ipv6.conf.all.forwarding", "net.bridge.bridge-nf-call-ip6tables"},
}

func read(setting string) (value string, err error) {
	text, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(setting, ".", "/"))
	return strings.TrimSpace(string(text)), err
}

// bridges are the names of those with an address of pods, by family.
func bridges(netNS string, pods []netip.Prefix) map[v1.IPFamily][]string {
	if len(pods) == 0 {
		return nil
	}
	s, err := netlinkx.Open(netNS)
	if err != nil {
		return nil
	}
	defer s.Close()
	links, linksErr := netlinkx.LinkList(s)
	addrs, addrsErr := netlinkx.AddrList(s, unix.AF_UNSPEC)
	if linksErr != nil || addrsErr != nil {
		return nil
	}
	found := map[v1.IPFamily][]string{}
	for _, link := range links {
		if _, is := link.(*netlink.Bridge); !is {
			continue
		}
		for family := range settings {
			if slices.ContainsFunc(addrs, func(a netlink.Addr) bool {
				addr, ok := netip.AddrFromSlice(a.IP)
				addr = addr.Unmap()
				return ok && a.LinkIndex == link.Attrs().Index && addr.Is4() == (family == v1.IPv4Protocol) &&
					slices.ContainsFunc(pods, func(p netip.Prefix) bool { return p.Contains(addr) })
			}) {
				found[family] = append(found[family], link.Attrs().Name)
			}
		}
	}
	return found
}

// pathFilter finds out whether the kernel drops packets because their sender is behind another device
// (net.ipv4.conf.DEVICE.rp_filter, ip-sysctl.rst). Where that hurts depends on the routes of others, so it
// counts what is dropped.
type pathFilter struct {
	drops uint64 // so far
	known bool
}

// fewDrops are not worth a word: a strict filter is there for forged senders.
const fewDrops = 10

// found tells what was dropped since the last call, in the network namespace of the thread.
func (p *pathFilter) found() (message string) {
	drops, ok := pathFilterDrops()
	if !ok {
		return ""
	}
	since, known := drops-p.drops, p.known
	p.drops, p.known = drops, true
	strict := strictDevices()
	if !known || since < fewDrops || len(strict) == 0 {
		return ""
	}
	return fmt.Sprintf("net.ipv4.conf.DEVICE.rp_filter is 1 for %s, and the kernel drops packets by it: clients get no answer if their packets arrive at another device than the one that leads to them: set it to 2",
		strings.Join(strict, ", "))
}

// pathFilterDrops reads how many packets the filter has dropped.
func pathFilterDrops() (drops uint64, ok bool) {
	const group, counter = "TcpExt:", "IPReversePathFilter"
	text, err := os.ReadFile("/proc/thread-self/net/netstat") // pairs of lines: names, and values
	if err != nil {
		return 0, false
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != group {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		for i := range min(len(names), len(fields)) {
			if names[i] == counter {
				drops, err := strconv.ParseUint(fields[i], 10, 64)
				return drops, err == nil
			}
		}
		break
	}
	return 0, false
}

// strictDevices are those at which the filter is strict.
func strictDevices() (names []string) {
	const folder, setting = "/proc/sys/net/ipv4/conf", "rp_filter"
	value := func(device string) string {
		text, _ := os.ReadFile(filepath.Join(folder, device, setting)) // a device may have gone
		return strings.TrimSpace(string(text))
	}
	devices, _ := os.ReadDir(folder)
	all := value("all")
	for _, d := range devices { // in order
		switch name := d.Name(); name {
		case "all", "default", "lo":
		default:
			if max(all, value(name)) == "1" {
				names = append(names, name)
			}
		}
	}
	const most = 5
	if n := len(names); n > most {
		names = append(names[:most], fmt.Sprintf("%d more", n-most))
	}
	return names
}
