package main

// table says what a table of the document shows.
type table struct {
	name    string // of its place in the document
	about   string // the head of the first column
	columns []column
	rows    []row
}

// column is a kind of figure. Its place is put where the benchmarks of the rows have "*".
type column struct {
	head  string
	place string
	units []string // the first one that the benchmark has is shown; "*" is the row's unit
}

// row is what a user asks. Sizes in braces are taken from the benchmark's name.
type row struct {
	what      string
	benchmark string
	unit      string
	none      string // the place of a column that has no such benchmark
}

func tables() []table {
	return []table{engineTimes(), engineCounts(), nftablesSizes(), nftablesWaits(), proxies(), parts()}
}

// Where the benchmarks of the engines are, all with the same names for the same syncs.
const (
	onNFTables = "internal/nftables.BenchmarkTargets"
	onLegacy   = "iptables.BenchmarkTargets/legacy/serviceplane"
	onNFTool   = "iptables.BenchmarkTargets/nft/serviceplane"
	onIPVS     = "ipvs.BenchmarkTargets/fake"
	onSockets  = "userspace.BenchmarkTargets/loopback"
	onPortals  = "userspace.BenchmarkTargets/portals"
)

func times() []string { return []string{"ms", "ns/op"} }

// syncs are the syncs that all engines have; userspace has no restart, as its sockets
// end with their process.
func syncs() []row {
	return []row{
		{what: "first sync of {N} Services × {E} endpoints", benchmark: "*/N=5000/E=10/first"},
		{what: "one endpoint replaced among them", benchmark: "*/N=5000/E=10/replaced=1"},
		{what: "{replaced} endpoints replaced in one sync", benchmark: "*/N=5000/E=10/replaced=100"},
		{what: "full sync, nothing changed", benchmark: "*/N=5000/E=10/full"},
		{what: "restart on the populated kernel", benchmark: "*/N=5000/E=10/restart", none: "userspace."},
	}
}

func engineTimes() table {
	return table{
		name: "engines", about: "time (floor)",
		columns: []column{
			{"nftables", onNFTables, times()},
			{"iptables-legacy", onLegacy, times()},
			{"iptables-nft", onNFTool, times()},
			{"ipvs, fake kernel", onIPVS, times()},
			{"userspace", onSockets, times()},
			{"userspace, portals of nftables", onPortals, times()},
		},
		rows: syncs(),
	}
}

func engineCounts() table {
	allocs := []string{"allocs/op"}
	return table{
		name: "counts", about: "",
		columns: []column{
			{"nftables: elements", onNFTables, []string{"writes"}},
			{"transactions", onNFTables, []string{"transactions"}},
			{"allocations", onNFTables, allocs},
			{"iptables: lines", onLegacy, []string{"writes"}},
			{"allocations", onLegacy, allocs},
			{"ipvs: messages", onIPVS, []string{"messages"}},
			{"allocations", onIPVS, allocs},
			{"userspace: allocations", onSockets, allocs},
		},
		rows: syncs(),
	}
}

func nftablesSizes() table {
	const at = onNFTables + "/N=*/E=10/"
	units := append(times(), "heap-MB")
	return table{
		name: "sizes", about: "nftables: time (floor)",
		columns: []column{
			{"1,000 Services", "1000", units}, {"5,000", "5000", units}, {"10,000", "10000", units}, {"30,000", "30000", units},
		},
		rows: []row{
			{what: "first sync, {E} endpoints each", benchmark: at + "first"},
			{what: "one endpoint replaced", benchmark: at + "replaced=1"},
			{what: "full sync, nothing changed", benchmark: at + "full"},
			{what: "restart on the populated kernel", benchmark: at + "restart"},
			{what: "the table deleted by somebody, all of it back", benchmark: at + "deleted"},
			{what: "longest wait of another writer during the first sync", benchmark: at + "wait"},
			{what: "live heap afterwards, without the informers' objects", benchmark: at + "heap"},
		},
	}
}

func nftablesWaits() table {
	return table{
		name: "waits", about: "nftables",
		columns: []column{{"time (floor)", "", times()}, {"CPU time", "", []string{"cpu-ms"}}},
		rows: []row{
			{what: "first sync of {N} Services × {E} endpoints", benchmark: onNFTables + "/N=5000/E=50/first"},
			{what: "first sync of {N} Services × {E} endpoints", benchmark: onNFTables + "/N=45000/E=2/first"},
			{what: "an important Service answers while {N} are loaded", benchmark: onNFTables + "/N=10000/E=10/important"},
			{what: "a lone change among {N} Services is in the kernel, 99th percentile", benchmark: onNFTables + "/N=10000/E=10/lone"},
			{
				what:      "{rate} changes a second for {seconds} s among {N} Services, 99th percentile",
				benchmark: onNFTables + "/N=10000/E=10/sustained/rate=1000/seconds=60",
			},
		},
	}
}

func proxies() table {
	return table{
		name: "proxies", about: "userspace",
		columns: []column{
			{"no proxy", "", []string{"direct-*"}},
			{"bare splice(2)", "", []string{"limit-*"}},
			{"serviceplane", "", []string{"ours-*"}},
			{"nginx, 1 worker", "", []string{"nginx-*"}},
			{"nginx, 2 workers", "", []string{"nginx2-*"}},
			{"serviceplane / nginx, 1 worker", "", []string{"ours/nginx"}},
		},
		rows: []row{
			{what: "throughput of one connection", benchmark: "userspace.BenchmarkProxies/throughput", unit: "MB/s"},
			{what: "connections a second, {clients} clients", benchmark: "userspace.BenchmarkProxies/connections/clients=16", unit: "conn/s"},
			{what: "connections a second, {clients} clients", benchmark: "userspace.BenchmarkProxies/connections/clients=64", unit: "conn/s"},
		},
	}
}

func parts() table {
	return table{
		name: "parts", about: "",
		columns: []column{
			{"time", "", times()},
			{"memory", "", []string{"bytes/client", "B/op"}},
			{"allocations", "", []string{"allocs/op"}},
		},
		rows: []row{
			{what: "tracking: one endpoint of {E} flipped", benchmark: "changetracker.BenchmarkFlipOneEndpoint/E=5000"},
			{what: "tracking: one change among {N} Services", benchmark: "changetracker.BenchmarkOneChangeAmong/N=30000/E=2"},
			{what: "tracking: initial load of {N} Services × {E} endpoints", benchmark: "changetracker.BenchmarkInitialLoad/N=5000/E=10"},
			{what: "conntrack: {stale} stale flows deleted among {flows}", benchmark: "conntrack.BenchmarkClean/flows=100000/stale=1000"},
			{what: "userspace: an idle TCP connection, of {clients}", benchmark: "userspace.BenchmarkIdle/tcp/clients=1000"},
			{what: "userspace: an idle UDP client, of {clients}", benchmark: "userspace.BenchmarkIdle/udp/clients=1000"},
			{what: "tracing: a connection that is not sampled", benchmark: "tracing.BenchmarkUnsampledConnection"},
		},
	}
}
