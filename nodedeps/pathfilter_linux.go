package nodedeps

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

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
