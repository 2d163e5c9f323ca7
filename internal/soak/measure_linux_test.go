package soak

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// use is what this process and the kernel hold.
type use struct {
	heap                    uint64 // in bytes, after garbage collection
	goroutines, descriptors int
	flows                   int // of the node's connection tracking
	kernel                  kernelUse
}

// kernelUse counts the objects in the kernel's tables, and what is pinned of BPF.
type kernelUse struct{ Chains, Sets, Elements, Rules, Pins int }

func measure(t *testing.T, node *proxiertest.Host, pins string) use {
	t.Helper()
	descriptors, err := os.ReadDir("/proc/self/fd")
	netnstest.Check(t, err)
	runtime.GC()
	runtime.GC() // sync.Pools empty in two steps
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	return use{memory.HeapAlloc, runtime.NumGoroutine(), len(descriptors), flows(t, node), inKernel(t, node, pins)}
}

// flows counts the entries of a node's connection tracking that have not expired: the kernel removes those within a minute.
func flows(t *testing.T, node *proxiertest.Host) (n int) {
	t.Helper()
	netnstest.Check(t, node.Do(func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			list, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return err
			}
			n += len(list)
		}
		return nil
	}))
	return n
}

// Lines of nft list ruleset, and of the programs that print the tables of iptables.
var (
	nftChain   = regexp.MustCompile(`(?m)^\tchain .*`)                                      // read-only
	builtIn    = regexp.MustCompile(`chain (PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING) `) // read-only
	nftHook    = regexp.MustCompile(`(?m)^\t\ttype .* hook .*`)                             // read-only
	nftSet     = regexp.MustCompile(`(?m)^\t(set|map) `)                                    // read-only
	nftElement = regexp.MustCompile(`(?s)elements = \{[^}]*\}`)                             // read-only
	nftRule    = regexp.MustCompile(`(?m)^\t\t[a-z].* [a-z"].*$`)                           // read-only
	tableChain = regexp.MustCompile(`(?m)^:\S+ - `)                                         // read-only
	tableRule  = regexp.MustCompile(`(?m)^-A`)                                              // read-only
	programs   = []string{"iptables-legacy-save", "ip6tables-legacy-save"}                  // read-only
)

// needPrograms skips the test if a program is missing that prints the kernel's tables.
func needPrograms(t *testing.T) {
	t.Helper()
	for _, program := range append([]string{"nft"}, programs...) {
		if _, err := exec.LookPath(program); err != nil && os.Getenv(netnstest.RequireKernel) != "1" {
			t.Skipf("install nftables and iptables: %v", err)
		}
	}
}

// inKernel counts what all tables of a node hold, but for the chains that iptables itself
// makes and never deletes. nft shows the tables of iptables-nft too.
func inKernel(t *testing.T, node *proxiertest.Host, pins string) (k kernelUse) {
	t.Helper()
	if pins != "" {
		netnstest.Check(t, filepath.WalkDir(pins, func(_ string, _ fs.DirEntry, err error) error { k.Pins++; return err }))
	}
	ruleset := run(t, node, "nft", "list", "ruleset")
	k.Chains = len(nftChain.FindAllString(ruleset, -1)) - len(builtIn.FindAllString(ruleset, -1))
	k.Sets = len(nftSet.FindAllString(ruleset, -1))
	for _, list := range nftElement.FindAllString(ruleset, -1) {
		k.Elements += strings.Count(list, ",") + 1
	}
	ruleset = nftHook.ReplaceAllString(nftElement.ReplaceAllString(ruleset, ""), "")
	k.Rules = len(nftRule.FindAllString(ruleset, -1))
	for _, program := range programs {
		text := run(t, node, program)
		k.Chains += len(tableChain.FindAllString(text, -1))
		k.Rules += len(tableRule.FindAllString(text, -1))
	}
	return k
}

func run(t *testing.T, node *proxiertest.Host, program string, args ...string) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), program, args...)
	var out, faults strings.Builder
	command.Stdout, command.Stderr = &out, &faults
	netnstest.Check(t, node.Do(command.Start))
	if err := command.Wait(); err != nil {
		t.Fatalf("%s: %v: %s", program, err, &faults)
	}
	return out.String()
}

// spare is how many unused chains the nftables engine may keep in each IP family, for Services
// that soon need them again. Each has up to two elements and rules.
const spare = 128

// checkSockets is how many sockets the nftables engine may keep open for checks, one in each IP family: it opens them when
// another program may have changed the table.
const checkSockets = 2

// idleWorkers is how many goroutines mode userspace may keep for the next connections: 64 in each IP
// family.
const idleWorkers = 128

// check compares with what a new proxy makes of the same objects.
func (k kernelUse) check(t *testing.T, when string, want kernelUse) {
	t.Helper()
	most := want
	if want.Sets > 0 {
		most.Chains += 2 * spare
		most.Elements += 4 * spare
		most.Rules += 4 * spare
	}
	if k.Sets != most.Sets || k.Pins != most.Pins || k.Chains > most.Chains || k.Elements > most.Elements || k.Rules > most.Rules {
		t.Errorf("the kernel's tables %s: %+v, want at most %+v", when, k, most)
	}
	if k.Chains < want.Chains || k.Elements < want.Elements || k.Rules < want.Rules {
		t.Errorf("the kernel's tables %s: %+v, want at least %+v", when, k, want)
	}
}

// check compares with what there was in the beginning.
func (u use) check(t *testing.T, before use) {
	t.Helper()
	if u.goroutines > before.goroutines || u.descriptors > before.descriptors || u.flows > before.flows {
		t.Errorf("in the end: %v\nwant at most what there was in the beginning: %v", u, before)
	}
	if limit := before.heap + before.heap/4 + 4<<20; u.heap > limit {
		t.Errorf("heap of %d bytes, want at most %d: a quarter and 4 MiB more than in the beginning", u.heap, limit)
	}
}

func (u use) String() string {
	return fmt.Sprintf("heap %.1f MB, %d goroutines, %d descriptors, %d flows, %d chains, %d sets, %d elements, %d rules, %d pins",
		float64(u.heap)/1e6, u.goroutines, u.descriptors, u.flows, u.kernel.Chains, u.kernel.Sets, u.kernel.Elements, u.kernel.Rules, u.kernel.Pins)
}
