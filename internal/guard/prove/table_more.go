package main

// races run every test with a kernel under the race detector.
func races() (some []proof) {
	for _, r := range []struct {
		name, title string
		minutes     float64
		packages    []string
	}{
		{"nftables", "nftables", 12, []string{"./internal/nftables", "./nftables"}},
		{"iptables", "iptables", 12, []string{"./iptables"}},
		{"ipvs", "ipvs, but for those in virtual machines", 5, []string{"./ipvs"}},
		{"ebpf", "ebpf", 12, []string{"./ebpf", "./internal/bpfx"}},
		{"userspace", "userspace", 15, []string{"./userspace/..."}},
		{"examples", "the examples", 25, []string{"./examples/...", "./nodeproxy", "./docs"}},
		{"rest", "other packages with a kernel", 25, []string{
			"./canary/...", "./conntrack", "./endpointhealth", "./hybrid", "./nodedeps", "./packettrace", "./proxier", "./proxiertest",
			"./internal/allpackets", "./internal/chaos", "./internal/coexistence", "./internal/growth", "./internal/guard",
			"./proxiertest/history", "./internal/hostile", "./internal/jhash", "./internal/namespace", "./internal/netlinkx", "./internal/netns", "./internal/packetcost",
			"./internal/refusals", "./internal/soak",
		}},
	} {
		p := proof{
			name: "race-" + r.name, proves: "The race detector finds nothing in the tests of " + r.title + ".",
			packages: r.packages, needs: kernel(bpftool, compiler), whole: test(r.minutes, append([]string{"-race"}, r.packages...)...),
		}
		switch r.name {
		case "nftables", "iptables", "ebpf", "ipvs", "userspace": // the first package has the histories
			p.short = test(4, "-race", "-run=^TestHistories$", r.packages[0]).with("SERVICEPLANE_HISTORY_SEEDS=20")
		case "examples":
			p.needs = append(p.needs, browser)
		case "rest":
			p.needs = append(p.needs, foreign)
			p.short = test(4, "-race", "./canary/...", "./conntrack", "./endpointhealth", "./hybrid", "./proxier", "./internal/netlinkx")
		}
		some = append(some, p)
	}
	return some
}

// clusters play an API server and many nodes on a fake clock.
func clusters() []proof {
	cluster := []string{"./internal/cluster"}
	return []proof{
		{
			name: "cluster", proves: "In 10,000 clusters whose API server, watches and kernels fail, every node ends with what the API server has, in time.",
			packages: cluster, whole: test(4, "./internal/cluster", "-run=^TestSeeds$", "-seeds=10000"), short: test(1, "./internal/cluster", "-run=^TestSeeds$", "-budget=50s"),
		},
		{
			name: "cluster-large", proves: "1,000 nodes with faults follow in time.",
			packages: cluster, whole: test(3, "./internal/cluster", "-run=^TestLarge$", "-nodes=1000", "-seed=1"),
		},
		{
			name: "hostile", proves: "Every object at the limits of the API server costs no more than SECURITY.md says.",
			packages: []string{"./internal/hostile"}, needs: kernel(),
			whole: test(15, "./internal/hostile", "-hostile.objects=100"), short: test(2, "./internal/hostile", "-hostile.objects=3"),
		},
		{
			name: "growth", proves: "Twice the input takes no more than about twice the time, whatever reads, plans, writes or answers.",
			packages: []string{"./internal/growth"}, needs: kernel(), whole: test(1, "./internal/growth").with(all),
		},
		{
			name: "messages", proves: "Whichever message to nf_tables fails, the next full sync makes up for it.",
			packages: []string{"./internal/nftables"}, needs: kernel(), whole: test(2, "./internal/nftables", "-run=^TestAnyFailedMessage").with(all),
		},
	}
}

// nodes run the whole program, or one engine for long.
func nodes() []proof {
	return []proof{
		{
			name: "chaos", proves: "Nobody notices that the proxy is killed, stopped, replaced or configured anew.",
			packages: []string{"./internal/chaos", "./nodeproxy"}, needs: kernel(git),
			whole: test(35, "./internal/chaos", "-for=30m"), short: test(3, "./internal/chaos"),
		},
		{
			name: "descriptors", proves: "A proxy that may open no more descriptors says so, and goes on when it may.",
			packages: []string{"./nodeproxy"}, needs: kernel(), whole: test(3, "./nodeproxy", "-run=^TestEachDescriptor"),
		},
		{
			name: "files", proves: "A proxy whose files and programs are gone, full, read-only or broken goes on, and restores all when it ends.",
			packages: []string{"./nodeproxy"}, needs: kernel(),
			whole: test(3, "./nodeproxy", "-run=^TestFaultsOfFiles$", "-filefaults.all"), short: test(1, "./nodeproxy", "-run=^TestFaultsOfFiles$"),
		},
		{
			name: "soak", proves: "However many objects come, change and go, memory, descriptors and kernel objects end where they began.",
			packages: []string{"./internal/soak"}, needs: kernel(),
			whole: test(40, "./internal/soak", "-services=200", "-events=20000", "-at-once=100"), short: test(2, "./internal/soak"),
		},
		{
			name: "connections", proves: "200,000 short connections through userspace leave no descriptor, goroutine or memory.",
			packages: []string{"./userspace"}, whole: test(1, "./userspace", "-run=^TestShortConnectionsLeaveNothing$").with("SERVICEPLANE_SOAK=1"),
		},
		{
			name: "torn", proves: "No socket of ebpf sees a half-published set of endpoints.",
			packages: []string{"./ebpf"}, needs: kernel(),
			whole: test(20, "./ebpf", "-run=^TestNoStateIsTorn$", "-torn.connects=1000000"), short: test(2, "./ebpf", "-run=^TestNoStateIsTorn$", "-torn.connects=100000"),
		},
		{
			name: "deaths", proves: "Whatever step a process of ebpf dies at, the next one is right and leaves nothing.",
			packages: []string{"./ebpf"}, needs: kernel(),
			whole: test(10, "./ebpf", "-run=^TestDeathAtEachStep", "-deaths.every=1"), short: test(2, "./ebpf", "-run=^TestDeathAtEachStep"),
		},
		{
			name: "closings", proves: "No descriptor of a BPF object is closed twice.",
			packages: []string{"./internal/bpfx"}, needs: kernel(compiler),
			whole: test(15, "-race", "./internal/bpfx", "-run=^TestNoDescriptorIsClosedTwice$", "-bpfx.closings=10000000"),
			short: test(2, "-race", "./internal/bpfx", "-run=^TestNoDescriptorIsClosedTwice$", "-bpfx.closings=500000"),
		},
	}
}

// builds are about what is built, from what, and how fast it is.
func builds() []proof {
	everything := []string{"./..."}
	return []proof{
		{
			name: "fuzz", proves: "No input crashes a parser or what takes objects, or makes two readings differ.",
			packages: everything, files: []string{"hack/fuzz.sh"},
			whole: script(90, "hack/fuzz.sh").with("FUZZTIME=1m"), short: script(3, "hack/fuzz.sh").with("FUZZTIME=5s", "FUZZ_FOLDERS=2"),
		},
		{
			name: "benchmarks", proves: "Every benchmark works, and docs/PERFORMANCE.md shows the figures that do not depend on the machine.",
			packages: everything, files: []string{"hack/bench.sh", "docs/benchmarks.txt", "docs/PERFORMANCE.md"}, needs: kernel(nginx),
			whole: script(8, "hack/bench.sh", "-check"),
		},
		{
			name: "supplychain", proves: "Two builds of nodeproxy have the same bytes, its SBOM names every module, and all licences are allowed.",
			packages: []string{"./nodeproxy"}, files: []string{"hack/supplychain.sh", "hack/supplychain/", "nodeproxy/deploy/"}, needs: []need{git},
			whole: script(2, "hack/supplychain.sh"),
		},
		{
			name: "bpf", proves: "The BPF programs are those of their source.",
			files: []string{"ebpf/bpf/", "ebpf/*.o", "hack/ebpf.sh"}, needs: []need{needsRoot, git},
			whole: script(1, "hack/ebpf.sh", "-check"),
		},
		{
			name: "api", proves: "The API on Linux, macOS and Windows differs from the last release only by what CHANGELOG.md says.",
			packages: everything, files: []string{"CHANGELOG.md", "hack/api.sh"}, needs: []need{git, "need_apidiff"},
			whole: script(3, "hack/api.sh").with("SERVICEPLANE_REQUIRE_APIDIFF=1"),
		},
		{
			name: "platforms", proves: "Everything compiles on macOS, portable packages on Windows, and engines on arm64.",
			packages: everything, files: []string{"hack/platforms.sh"}, whole: script(5, "hack/platforms.sh"),
		},
		{
			name: "gate-busy", proves: "The gate passes ten times beside four busy loops.",
			files: []string{"hack/busy.sh", "hack/test.sh"}, needs: []need{needsRoot}, whole: script(300, "hack/busy.sh"),
		},
	}
}
