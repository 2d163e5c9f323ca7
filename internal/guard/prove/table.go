package main

import (
	"fmt"
	"slices"
)

// What proofs need.
const (
	nft      need = "need_apt nft nftables"
	iptables need = "need_apt iptables iptables"
	ipset    need = "need_apt ipset ipset"
	bpftool  need = "need_apt bpftool bpftool"
	git      need = "need_apt git git"
	compiler need = "command -v gcc || install_apt gcc libc6-dev"
	nginx    need = "need_nginx"
	foreign  need = "hack/foreign.sh"
	browser  need = "need_apt chromium chromium; need_apt chromedriver chromium-driver"
)

// kernel is what every test with a kernel needs, and what else one does.
func kernel(more ...need) []need { return append([]need{needsRoot, nft, iptables, ipset}, more...) }

// test returns the command of tests. A time-out is for what hangs.
func test(minutes float64, args ...string) form {
	return form{minutes: minutes, argv: append([]string{"go", "test", "-count=1", "-timeout=12h"}, args...)}
}

// script returns the command of a script.
func script(minutes float64, argv ...string) form { return form{minutes: minutes, argv: argv} }

// with adds environment variables.
func (f form) with(env ...string) form {
	f.env = append(slices.Clone(f.env), env...)
	return f
}

// all lets tests run every variant and setting, of which the gate draws some.
const all = "SERVICEPLANE_ALL=1"

// proofs returns the table.
func proofs() []proof {
	return slices.Concat(kernels(), packets(), histories(), races(), clusters(), nodes(), builds())
}

// kernels run in virtual machines.
func kernels() (some []proof) {
	machines := []string{"hack/vm/"}
	folders := []string{"./internal/nftables", "./nftables", "./iptables", "./ipvs", "./ebpf", "./userspace/...", "./conntrack"}
	for _, k := range []struct{ name, title string }{
		{"5.10", "Linux 5.10, the oldest that is supported"}, {"6.1", "Linux 6.1"}, {"6.12", "Linux 6.12"}, {"newest", "the newest Linux that Debian has"},
	} {
		some = append(some, proof{
			name: "kernel-" + k.name, proves: fmt.Sprintf("On %s, the kernel does what the engines ask of it.", k.title),
			packages: folders, files: machines, needs: []need{needsRoot},
			whole: script(15, "hack/vm/test.sh", k.name), short: script(5, "hack/vm/test.sh", "-draw", "1", k.name),
		})
	}
	return append(some,
		proof{
			name: "kernels-all", proves: "On every kernel, what depends little on the kernel holds too.",
			packages: append(folders, "./nodeproxy", "./internal/refusals"), files: machines, needs: []need{needsRoot},
			whole: script(240, "hack/vm/test.sh", "-all"),
		},
		proof{
			name: "kernels-packets", proves: "Packets of every engine fare the same on every kernel: the table of docs/ENGINES.md.",
			packages: folders, files: machines, needs: kernel(),
			whole: script(120, "hack/vm/test.sh", "-packets"),
		},
		proof{
			name: "chaos-ipvs", proves: "In mode ipvs, nobody notices that the proxy is killed, stopped or replaced; also when the clock jumps.",
			packages: []string{"./internal/chaos", "./nodeproxy"}, files: machines, needs: []need{needsRoot, git},
			whole: script(15, "hack/vm/chaos.sh", "6.1", "-engine=ipvs", "-for=10m"),
		})
}

// packets compare what packets do with the rules.
func packets() []proof {
	refusals, refusalsNeed := []string{"./internal/refusals"}, kernel()
	return []proof{
		{
			name: "packets-nftables", proves: "Real packets fare as every rule says with nftables, in every setting.",
			packages: []string{"./nftables"}, needs: kernel(), whole: test(4, "./nftables", "-run=^TestPackets").with(all),
		},
		{
			name: "packets-iptables", proves: "Real packets fare as every rule says with iptables, both variants.",
			packages: []string{"./iptables"}, needs: kernel(), whole: test(6, "./iptables", "-run=^TestPackets").with(all),
		},
		{
			name: "packets-ebpf", proves: "Real packets fare as every rule says with ebpf, in all modes.",
			packages: []string{"./ebpf"}, needs: kernel(), whole: test(8, "./ebpf", "-run=^TestPackets$").with(all),
		},
		{
			name: "packets-userspace", proves: "Real packets fare as every rule says with userspace, behind both portals and at the node's loopback.",
			packages: []string{"./userspace/..."}, needs: kernel(), whole: test(8, "./userspace/...", "-run=^TestPackets").with(all),
		},
		{
			name: "explanations", proves: "A packet of any kind fares as Explain says, 2,048 for an engine.",
			packages: []string{"./nftables", "./iptables", "./userspace/..."}, needs: kernel(),
			whole: test(8, "./nftables", "./iptables", "./userspace/...", "-run=^TestExplainAgrees").with(all),
		},
		{
			name: "all-packets", proves: "Every packet that 40 clusters distinguish fares as a second reading of the rules says, also between the commits of a change.",
			packages: []string{"./internal/allpackets"}, needs: kernel(),
			whole: test(25, "./internal/allpackets", "-allpackets.seeds=40"), short: test(3, "./internal/allpackets", "-allpackets.seeds=3"),
		},
		{
			name: "planted-faults", proves: "A test fails for each of the faults planted in trackers, resolver, driver and planners.",
			packages: []string{"./internal/allpackets", "./desired"}, needs: kernel(),
			whole: test(40, "./internal/allpackets", "-run=^TestPlantedFaults$", "-allpackets.plant=."),
			short: test(4, "./internal/allpackets", "-run=^TestPlantedFaults$", "-allpackets.plants=3"),
		},
		{
			name: "refusals", proves: "No packet gets through that must be refused.",
			packages: refusals, needs: refusalsNeed,
			whole: test(30, "./internal/refusals", "-run=^TestRefusals$", "-refusals.full"), short: test(1.5, "./internal/refusals", "-run=^TestRefusals$"),
		},
		{
			name: "refusals-changes", proves: "While Services change, no packet gets through that was refused before and is refused or forwarded after.",
			packages: refusals, needs: refusalsNeed,
			whole: test(60, "./internal/refusals", "-run=^TestNothing", "-refusals.toggles=100"), short: test(2, "./internal/refusals", "-run=^TestNothing", "-refusals.toggles=2"),
		},
		{
			name: "transitions", proves: "Whatever changes of a Service, no connection and no datagram is lost while an endpoint is right.",
			packages: refusals, needs: refusalsNeed,
			whole: test(8, "./internal/refusals", "-run=^TestTransitions", "-refusals.asks=20000").with(all), short: test(2, "./internal/refusals", "-run=^TestTransitions"),
		},
		{
			name: "coexistence", proves: "Rules of firewalls, container engines and CNI plugins stay, and packets fare beside them.",
			packages: []string{"./internal/coexistence"}, files: []string{"hack/foreign.sh"}, needs: kernel(foreign),
			whole: test(4, "./internal/coexistence").with(all), short: test(2, "./internal/coexistence"),
		},
	}
}

// historyOf is an engine whose histories run, and how long.
type historyOf struct {
	engine, folder                 string
	seeds, few                     int
	whole, short                   float64 // minutes of so many seeds, and of few
	calls, someCalls, bugs, oneBug float64 // minutes; 0 if the whole is short
}

// histories are events and faults in random order, against each engine.
func histories() (some []proof) {
	for _, h := range []historyOf{
		{"nftables", "./internal/nftables", 2000, 150, 20, 1.5, 8, 1, 6, 1.5},
		{"iptables", "./iptables", 2000, 50, 90, 2, 8, 2, 8, 2},
		{"ipvs", "./ipvs", 2000, 500, 4, 1, 1, 0, 1, 0},
		{"ebpf", "./ebpf", 2000, 100, 30, 1.5, 5, 1.5, 6, 1},
		{"userspace", "./userspace", 2000, 500, 4, 1, 1, 0, 2, 0},
	} {
		base := proof{packages: []string{h.folder}, needs: kernel()}
		seeds, calls, bugs := base, base, base
		seeds.name = "histories-" + h.engine
		seeds.proves = fmt.Sprintf("After any history with failed calls, deaths and damage, %s programs what a new process would.", h.engine)
		seeds.whole = test(h.whole, h.folder, "-run=^TestHistories$").with(fmt.Sprintf("SERVICEPLANE_HISTORY_SEEDS=%d", h.seeds))
		seeds.short = test(h.short, h.folder, "-run=^TestHistories$").with(fmt.Sprintf("SERVICEPLANE_HISTORY_SEEDS=%d", h.few))
		calls.name = "calls-" + h.engine
		calls.proves = fmt.Sprintf("Each call of %s in a change and in a first sync may fail in each way.", h.engine)
		calls.whole = test(h.calls, h.folder, "-run=^TestEachCallOfAHistory$").with("SERVICEPLANE_HISTORY_SEEDS=1")
		if h.someCalls > 0 {
			calls.short = test(h.someCalls, h.folder, "-run=^TestEachCallOfAHistory$")
		}
		bugs.name = "bugs-" + h.engine
		bugs.proves = fmt.Sprintf("The histories of %s catch each of twelve planted bugs.", h.engine)
		bugs.whole = test(h.bugs, h.folder, "-run=^TestHistoriesCatchPlantedBugs$").with("SERVICEPLANE_HISTORY_SEEDS=1")
		if h.oneBug > 0 {
			bugs.short = test(h.oneBug, h.folder, "-run=^TestHistoriesCatchPlantedBugs$")
		}
		some = append(some, seeds, calls, bugs)
	}
	return append(some,
		proof{
			name: "histories-modes", proves: "When processes of different modes follow each other, the last one's rules are right, and nothing is left of the others.",
			packages: []string{"./proxiertest/history"}, needs: kernel(),
			whole: test(6, "./proxiertest/history", "-run=^TestModesChange$").with("SERVICEPLANE_HISTORY_SEEDS=200"),
			short: test(1, "./proxiertest/history", "-run=^TestModesChange$").with("SERVICEPLANE_HISTORY_SEEDS=40"),
		},
		proof{
			name: "histories-pure", proves: "Trackers, tables and the oracle agree after any history; every short history of a virtual server keeps the laws.",
			packages: []string{"./changetracker", "./desired", "./ipvs", "./internal/nftables"}, needs: kernel(),
			whole: test(3, "./changetracker", "./desired", "./ipvs", "./internal/nftables", "-run=^(TestAnyHistory|TestRandomHistories|TestEveryHistory)").with(all),
		},
		proof{
			name: "versions", proves: "What a node says to have programmed is in its kernel, whatever fails, over HTTP with an API server.",
			packages: []string{"./informer", "./nftables"}, needs: kernel(),
			whole: test(5, "./informer", "./nftables", "-run=^(TestANodeHasWhatItSays|TestTheKernelHasWhatTheNodeSays)$").with("SERVICEPLANE_HISTORY_SEEDS=100"),
			short: test(0.5, "./informer", "./nftables", "-run=^(TestANodeHasWhatItSays|TestTheKernelHasWhatTheNodeSays)$"),
		})
}
