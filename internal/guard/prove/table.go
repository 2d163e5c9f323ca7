package main

import (
	"fmt"
	"slices"
	"strings"
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

// Settings of tests: all lets them run every variant and setting, of which the gate draws some.
const (
	all   = "SERVICEPLANE_ALL=1 "
	seeds = "SERVICEPLANE_HISTORY_SEEDS="
)

// run returns the form with a command. Without time or command, there is none. A time-out is for what hangs.
func run(minutes float64, line string) form {
	if minutes == 0 || line == "" {
		return form{}
	}
	return form{minutes, strings.Fields(strings.Replace(line, "go test", "go test -count=1 -timeout=12h", 1))}
}

// row returns a proof. It depends on the packages and the script that its commands name.
func row(name, proves string, needs []need, whole form, short ...form) proof {
	p := proof{name: name, proves: proves, needs: needs, whole: whole, short: append(short, form{})[0]}
	return p.on(slices.DeleteFunc(slices.Concat(whole.words, p.short.words), func(word string) bool {
		return !strings.HasPrefix(word, "./") && !strings.HasPrefix(word, "hack/")
	})...)
}

// on adds packages and files that the proof depends on.
func (p proof) on(names ...string) proof {
	for _, name := range names {
		if to := &p.files; !slices.Contains(slices.Concat(p.packages, p.files), name) {
			if strings.HasPrefix(name, "./") {
				to = &p.packages
			}
			*to = append(*to, name)
		}
	}
	return p
}

// proofs returns the table.
func proofs() []proof {
	return slices.Concat(kernels(), packets(), histories(), races(), clusters(), nodes(), builds())
}

// kernels run in virtual machines.
func kernels() (some []proof) {
	on := []string{"hack/vm/", "./internal/nftables", "./nftables", "./iptables", "./ipvs", "./ebpf", "./userspace/...", "./conntrack"}
	for _, k := range [][2]string{
		{"5.10", "Linux 5.10, the oldest that is supported"}, {"6.1", "Linux 6.1"}, {"6.12", "Linux 6.12"}, {"newest", "the newest Linux that Debian has"},
	} {
		some = append(some, row("kernel-"+k[0], fmt.Sprintf("On %s, the kernel does what the engines ask of it.", k[1]), []need{needsRoot},
			run(15, "hack/vm/test.sh "+k[0]), run(5, "hack/vm/test.sh -draw 1 "+k[0])).on(on...))
	}
	return append(some,
		row("kernels-all", "On every kernel, what depends little on the kernel holds too.", []need{needsRoot},
			run(240, "hack/vm/test.sh -all")).on(on...).on("./node/nodeproxy", "./internal/refusals"),
		row("kernels-packets", "Packets of every engine fare the same on every kernel.", kernel(),
			run(120, "hack/vm/test.sh -packets")).on(on...),
		row("chaos-ipvs", "In mode ipvs, nobody notices that the proxy is killed, stopped or replaced; also when the clock jumps.", []need{needsRoot, git},
			run(15, "hack/vm/chaos.sh 6.1 -engine=ipvs -for=10m")).on("hack/vm/", "./internal/chaos", "./node/nodeproxy"))
}

// packets compare what packets do with the rules.
func packets() (some []proof) {
	for _, e := range [][3]string{
		{"nftables", "./internal/nftables", "TestAnyFailedMessage"}, {"iptables", "./iptables", "TestPackets|TestExplain|TestTrace"}, {"ebpf", "./ebpf", "TestPackets"},
	} {
		some = append(some, row("variants-"+e[0], "What else the gate tests of "+e[0]+" in one family or variant by chance holds in all.", kernel(bpftool),
			run(4, all+"go test "+e[1]+" -skip=^(TestHistories|TestEachCall|"+e[2]+")")))
	}
	return append(some,
		row("packets-nftables", "Real packets fare as every rule says with nftables, in every setting.", kernel(),
			run(4, all+"go test ./nftables -run=^TestPackets")),
		row("packets-iptables", "Real packets fare as every rule says with iptables, both variants.", kernel(), run(6, all+"go test ./iptables -run=^TestPackets")),
		row("packets-ebpf", "Real packets fare as every rule says with ebpf, in all modes.", kernel(), run(8, all+"go test ./ebpf -run=^TestPackets$")),
		row("packets-userspace", "Real packets fare as every rule says with userspace, behind both portals and at the node's loopback.", kernel(),
			run(8, all+"go test ./userspace/... -run=^TestPackets")),
		row("explanations", "A packet of any kind fares as Explain says, 2,048 for an engine.", kernel(),
			run(8, all+"go test ./nftables ./iptables ./userspace/... -run=^TestExplainAgrees")),
		row("all-packets", "Every packet that 40 clusters distinguish fares as a second reading of the rules says, also between the commits of a change.", kernel(),
			run(25, "go test ./internal/allpackets -allpackets.seeds=40"), run(3, "go test ./internal/allpackets -allpackets.seeds=3")),
		row("planted-faults", "A test fails for each of the faults planted in trackers, resolver, driver and planners.", kernel(),
			run(40, "go test ./internal/allpackets -run=^TestPlantedFaults$ -allpackets.plant=."),
			run(4, "go test ./internal/allpackets -run=^TestPlantedFaults$ -allpackets.plants=3")).on("./desired"),
		row("refusals", "No packet gets through that must be refused.", kernel(),
			run(30, all+"go test ./internal/refusals -run=^TestRefusals$ -refusals.full"), run(1.5, "go test ./internal/refusals -run=^TestRefusals$")),
		row("refusals-changes", "While Services change, no packet gets through that was refused before and is refused or forwarded after.", kernel(),
			run(60, "go test ./internal/refusals -run=^TestNothing -refusals.toggles=100"), run(2, "go test ./internal/refusals -run=^TestNothing -refusals.toggles=2")),
		row("transitions", "Whatever changes of a Service, no connection and no datagram is lost while an endpoint is right.", kernel(),
			run(8, all+"go test ./internal/refusals -run=^(TestTransitions|TestNoConnectionIsLost) -refusals.asks=20000"), run(2, "go test ./internal/refusals -run=^TestTransitions")),
		row("coexistence", "Rules of firewalls, container engines and CNI plugins stay, and packets fare beside them.", kernel(foreign),
			run(4, all+"go test ./internal/coexistence"), run(2, "go test ./internal/coexistence")).on("hack/foreign.sh"),
	)
}

// histories are events and faults in random order, against each engine.
func histories() (some []proof) {
	for _, h := range []struct {
		engine, folder, many, few      string  // seeds of both forms
		whole, short                   float64 // minutes of many, and of few
		calls, someCalls, bugs, oneBug float64 // minutes; 0 if the whole is short
	}{
		{"nftables", "./internal/nftables", "2000 ", "150 ", 20, 1.5, 8, 1, 6, 1.5},
		{"iptables", "./iptables", "500 ", "50 ", 25, 2, 8, 2, 8, 2},
		{"ipvs", "./ipvs", "2000 ", "500 ", 4, 1, 1, 0, 1, 0},
		{"ebpf", "./ebpf", "2000 ", "100 ", 30, 1.5, 5, 1.5, 6, 1},
		{"userspace", "./userspace", "2000 ", "500 ", 4, 1, 1, 0, 2, 0},
	} {
		some = append(some,
			row("histories-"+h.engine, fmt.Sprintf("After any history with failed calls, deaths and damage, %s programs what a new process would.", h.engine), kernel(),
				run(h.whole, all+seeds+h.many+"go test "+h.folder+" -run=^TestHistories$"), run(h.short, seeds+h.few+"go test "+h.folder+" -run=^TestHistories$")),
			row("calls-"+h.engine, fmt.Sprintf("Each call of %s in a change and in a first sync may fail in each way.", h.engine), kernel(),
				run(h.calls, all+seeds+"1 "+"go test "+h.folder+" -run=^TestEachCallOfAHistory$"), run(h.someCalls, "go test "+h.folder+" -run=^TestEachCallOfAHistory$")),
			row("bugs-"+h.engine, fmt.Sprintf("The histories of %s catch each of twelve planted bugs.", h.engine), kernel(),
				run(h.bugs, all+seeds+"1 "+"go test "+h.folder+" -run=^TestHistoriesCatchPlantedBugs$"), run(h.oneBug, "go test "+h.folder+" -run=^TestHistoriesCatchPlantedBugs$")))
	}
	const modes = "go test ./proxiertest/history -run=^TestModesChange$"
	const versions = "go test ./informer ./nftables -run=^(TestANodeHasWhatItSays|TestTheKernelHasWhatTheNodeSays)$"
	return append(some,
		row("histories-modes", "When processes of different modes follow each other, the last one's rules are right, and nothing is left of the others.", kernel(),
			run(6, seeds+"200 "+modes), run(1, seeds+"40 "+modes)),
		row("histories-pure", "Trackers, tables and the oracle agree after any history; every short history of a virtual server keeps the laws.", kernel(),
			run(3, all+"go test ./changetracker ./desired ./ipvs ./internal/nftables -run=^(TestAnyHistory|TestAnyParts|TestNothingIsLeft|TestRandomHistories|TestEveryHistory)")),
		row("versions", "What a node says to have programmed is in its kernel, whatever fails, over HTTP with an API server.", kernel(),
			run(5, seeds+"100 "+versions), run(0.5, versions)))
}

// races run every test with a kernel under the race detector.
func races() (some []proof) {
	const few = seeds + "20 go test -race -run=^TestHistories$ "
	const rest = "./node/canary/... ./conntrack ./node/endpointhealth ./node/leastconnections ./hybrid ./node/nodedeps ./internal/nftrace ./node/packettrace ./proxier ./proxiertest ./proxiertest/history" +
		" ./internal/allpackets ./internal/chaos ./internal/coexistence ./internal/growth ./internal/guard ./internal/hostile ./internal/jhash" +
		" ./internal/namespace ./internal/netlinkx ./internal/netns ./internal/nft ./internal/packetcost ./internal/refusals ./internal/soak"
	for _, r := range []struct {
		name, title     string
		minutes         float64
		packages, short string
		needs           []need
	}{
		{"nftables", "nftables", 12, "./internal/nftables ./nftables", few + "./internal/nftables", nil},
		{"iptables", "iptables", 12, "./iptables", few + "./iptables", nil},
		{"ipvs", "ipvs, but for those in virtual machines", 5, "./ipvs", few + "./ipvs", nil},
		{"ebpf", "ebpf", 12, "./ebpf ./internal/bpfx", few + "./ebpf", nil},
		{"userspace", "userspace", 15, "./userspace/...", few + "./userspace/...", nil},
		{"examples", "the examples", 25, "./examples/... ./node/nodeproxy ./internal/guard/embedding", "", []need{browser}},
		{"rest", "other packages with a kernel", 25, rest, "go test -race ./node/canary/... ./conntrack ./node/endpointhealth ./hybrid ./proxier ./internal/netlinkx ./internal/nft", []need{foreign}},
	} {
		some = append(some, row("race-"+r.name, "The race detector finds nothing in the tests of "+r.title+".",
			kernel(append(r.needs, bpftool, compiler)...), run(r.minutes, "go test -race "+r.packages), run(4, r.short)))
	}
	return some
}

// clusters play an API server and many nodes on a fake clock.
func clusters() []proof {
	return []proof{
		row("cluster", "In 10,000 clusters whose API server, watches and kernels fail, every node ends with what the API server has, in time.", nil,
			run(4, all+"go test ./internal/cluster -run=^(TestSeeds|TestPlantedFaults)$ -seeds=10000"), run(1, "go test ./internal/cluster -run=^TestSeeds$ -budget=50s")),
		row("cluster-large", "1,000 nodes with faults follow in time.", nil, run(3, "go test ./internal/cluster -run=^TestLarge$ -nodes=1000 -seed=1")),
		row("hostile", "Every object at the limits of the API server costs no more than SECURITY.md says.", kernel(),
			run(15, "go test ./internal/hostile -hostile.objects=100"), run(2, "go test ./internal/hostile -hostile.objects=3")),
		row("growth", "Twice the input takes no more than about twice the time, whatever reads, plans, writes or answers.", kernel(),
			run(1, all+"go test ./internal/growth")),
		row("messages", "Whichever message to nf_tables fails, the next full sync makes up for it.", kernel(),
			run(2, all+"go test ./internal/nftables -run=^TestAnyFailedMessage")),
	}
}

// nodes run the whole program, or one engine for long.
func nodes() []proof {
	const closings = "go test -race ./internal/bpfx -run=^TestNoDescriptorIsClosedTwice$ -bpfx.closings="
	return []proof{
		row("chaos", "Nobody notices that the proxy is killed, stopped, replaced or configured anew.", kernel(git),
			run(35, "go test ./internal/chaos -for=30m"), run(3, "go test ./internal/chaos")).on("./node/nodeproxy"),
		row("modes", "A change from any mode to any other cuts no connection and refuses none.", kernel(),
			run(5, all+"go test ./node/nodeproxy -run=^TestNoConnectionIsCut$")),
		row("descriptors", "A proxy that may open no more descriptors says so, and goes on when it may.", kernel(),
			run(3, "go test ./node/nodeproxy -run=^TestEachDescriptor")),
		row("files", "A proxy whose files and programs are gone, full, read-only or broken goes on, and restores all when it ends.", kernel(),
			run(3, "go test ./node/nodeproxy -run=^TestFaultsOfFiles$ -filefaults.all"), run(1, "go test ./node/nodeproxy -run=^TestFaultsOfFiles$")),
		row("soak", "However many objects come, change and go, memory, descriptors and kernel objects end where they began.", kernel(),
			run(40, "go test ./internal/soak -services=200 -events=20000 -at-once=100"), run(2, "go test ./internal/soak")),
		row("connections", "200,000 short connections through userspace leave no descriptor, goroutine or memory.", nil,
			run(1, "SERVICEPLANE_SOAK=1 go test ./userspace -run=^TestShortConnectionsLeaveNothing$")),
		row("torn", "No socket of ebpf sees a half-published set of endpoints.", kernel(),
			run(20, "go test ./ebpf -run=^TestNoStateIsTorn$ -torn.connects=1000000"), run(2, "go test ./ebpf -run=^TestNoStateIsTorn$ -torn.connects=100000")),
		row("deaths", "Whatever step a process of ebpf dies at, the next one is right and leaves nothing.", kernel(),
			run(10, "go test ./ebpf -run=^TestDeathAtEachStep -deaths.every=1"), run(2, "go test ./ebpf -run=^TestDeathAtEachStep")),
		row("closings", "No descriptor of a BPF object is closed twice.", kernel(compiler), run(15, closings+"10000000"), run(2, closings+"500000")),
	}
}

// builds are about what is built, from what, and how fast it is.
func builds() []proof {
	return []proof{
		row("fuzz", "No input crashes a parser or what takes objects, or makes two readings differ.", nil,
			run(90, "FUZZTIME=1m hack/fuzz.sh"), run(3, "FUZZTIME=5s FUZZ_FOLDERS=2 hack/fuzz.sh")).on("./..."),
		row("benchmarks", "Every benchmark works, and docs/PERFORMANCE.md shows the figures that do not depend on the machine.", kernel(nginx),
			run(8, "hack/bench.sh -check")).on("./...", "docs/benchmarks.txt", "docs/PERFORMANCE.md"),
		row("supplychain", "Two builds of nodeproxy have the same bytes, its SBOM names every module, and all licences are allowed.", []need{git},
			run(2, "hack/supplychain.sh")).on("./node/nodeproxy", "hack/supplychain/", "node/nodeproxy/deploy/"),
		row("bpf", "The BPF programs are those of their source.", []need{needsRoot, git}, run(1, "hack/ebpf.sh -check")).on("ebpf/bpf/", "ebpf/*.o"),
		row("api", "CHANGELOG.md names each change since the last release that breaks programs on Linux, macOS or Windows.", []need{git, "need_apidiff"},
			run(3, "hack/api.sh")).on("./...", "CHANGELOG.md"),
		row("platforms", "Everything compiles on macOS, portable packages on Windows, and engines on arm64.", nil, run(5, "hack/platforms.sh")).on("./..."),
		row("gate-busy", "The gate passes ten times beside four busy loops.", []need{needsRoot}, run(300, "hack/busy.sh")).on("hack/test.sh"),
	}
}
