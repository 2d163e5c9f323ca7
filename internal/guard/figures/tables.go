package main

import (
	"slices"
	"strings"
)

// table describes a table of the document.
type table struct {
	name    string // in its marks
	about   string // the head of the first column
	columns []column
	rows    []row
}

// column is a kind of figure. Its place replaces "*" in the names of the rows' benchmarks.
type column struct {
	head  string
	place string
	units string // the first one that the benchmark has is shown; "*" is the row's unit
}

// row is one case. Sizes in braces are taken from the benchmark's name.
type row struct {
	what      string
	benchmark string // and the unit, after a space, if columns ask for it
	none      string // the place of a column that has no such benchmark
}

// The benchmarks of the engines, which name the same syncs alike.
const (
	onNFTables = "internal/nftables.BenchmarkTargets"
	onLegacy   = "iptables.BenchmarkTargets/legacy/serviceplane"
	onNFTool   = "iptables.BenchmarkTargets/nft/serviceplane"
	onIPVS     = "ipvs.BenchmarkTargets/fake"
	onSockets  = "userspace.BenchmarkTargets/loopback"
	onPortals  = "userspace.BenchmarkTargets/portals"
	onSizes    = "internal/nftables.Benchmark*/E=10/"

	onMemory     = "node/nodeproxy.BenchmarkMemory/N=10000/E=10/streamed=*"
	onSocketMaps = "ebpf.BenchmarkSockets/N=*/E=10/"
	onProxies    = "userspace.BenchmarkProxies/"
	onEvents     = "node/nodeproxy.BenchmarkEventToPacket"
	onStalls     = "internal/nftables.BenchmarkStalls/N=50000/E=2/"
)

// Units of columns.
const (
	times  = "ms ns/op"
	allocs = "allocs/op"
	cpus   = "cpu-ms"
	sizes  = times + " heap-MB"
)

// syncs are those that all engines have. The sockets of userspace end with their process.
var syncs = []row{ // read-only
	{what: "first sync of {N} Services × {E} endpoints", benchmark: "*/N=5000/E=10/first"},
	{what: "one endpoint replaced among them", benchmark: "*/N=5000/E=10/replaced=1"},
	{what: "{replaced} endpoints replaced in one sync", benchmark: "*/N=5000/E=10/replaced=100"},
	{what: "full sync, nothing changed", benchmark: "*/N=5000/E=10/full"},
	{what: "restart on the populated kernel", benchmark: "*/N=5000/E=10/restart", none: "userspace."},
}

var tables = []table{ // read-only
	{"engines", "time (floor)", columns(
		"nftables", onNFTables, times, "iptables-legacy", onLegacy, times, "iptables-nft", onNFTool, times, "ipvs, fake kernel", onIPVS, times,
		"userspace", onSockets, times, "userspace, portals of nftables", onPortals, times), syncs},
	{"counts", "", columns(
		"nftables: elements", onNFTables, "writes", "transactions", onNFTables, "transactions", "allocations", onNFTables, allocs,
		"iptables: lines", onLegacy, "writes", "allocations", onLegacy, allocs, "ipvs: messages", onIPVS, "messages", "allocations", onIPVS, allocs,
		"userspace: allocations", onSockets, allocs), syncs},
	{"sizes", "nftables: time (floor)", columns(
		"1,000 Services", "Targets/N=1000", sizes, "5,000", "Targets/N=5000", sizes, "10,000", "Targets/N=10000", sizes,
		"30,000", "Targets/N=30000", sizes, "100,000", "Large/N=100000", sizes), under(onSizes,
		"first", "first sync, {E} endpoints each", "replaced=1", "one endpoint replaced", "full", "full sync, nothing changed",
		"restart", "restart on the populated kernel", "deleted", "the table deleted by another program, all of it restored",
		"wait", "longest wait of another writer during the first sync", "heap", "live heap afterwards, without the informers' objects")},
	{"stalls", "nftables, 50,000 Services", columns(
		"the change", "", times, "one endpoint, after it", "", "next-ms", "one of another namespace, meanwhile", "", "beside-ms", "another writer waits: median", "", "p50-ms",
		"99th percentile", "", "p99-ms", "longest", "", "longest-ms"), under(onStalls,
		"alone", "no change", "come", "come, 2 endpoints each", "change", "all endpoints replaced", "full", "full sync, nothing changed",
		"repair", "the table deleted by a third program, all of it restored", "restart", "restart on the populated kernel", "go", "deleted")},
	{"events", "nodeproxy, mode nftables, 10 endpoints of each Service", columns(
		"median", "", times, "99th percentile", "", "p99-ms", "CPU time of nodeproxy for a change", "", cpus, "connections meanwhile", "", "connections",
		"failed", "", "failed"), slices.Concat(
		each("a lone change among {N} Services", onEvents+"/N=#/E=10/lone", "1000", "10000", "30000"),
		each("beside 100 changes a second among {N}", onEvents+"/N=#/E=10/busy", "10000", "30000"),
		each("a change while nodeproxy is dead, after its start among {N}", onEvents+"/N=#/E=10/killed", "10000", "30000"))},
	{"packets", "median", columns(
		"connect, 10 Services", "10", "connect-ms", "connect, 10,000", "10000", "connect-ms", "connect, 30,000", "30000", "connect-ms",
		"99th percentile", "10000", "connect-p99-ms", "node port", "10000", "connect-node-port-ms",
		"connection with a request", "10000", "crr-ms", "UDP request", "10000", "udp-ms", "throughput", "10000", "MB/s",
		"datagrams a second", "10000", "packet/s", "first packet, CPU time", "10000", "first-ms"), packets()},
	{"sockets", "ebpf, IPv4, 10 endpoints of each Service", columns(
		"10,000 Services", "10000", "*", "30,000", "30000", "*", "100,000", "100000", "*"), under(onSocketMaps,
		"first ms", "first sync: what sockets add", "first rules-ms", "first sync: the rules",
		"restart ms", "restart, nothing changed: what sockets add", "restart rules-ms", "restart: the rules",
		"replaced=1 ns/change", "one endpoint replaced, in the maps",
		"memory maps-MiB", "memory of the maps, all counted", "hook ns/connect", "connect(2): the program",
		"hook/real-peer ns/connect", "the same with RealPeer")},
	{"forwarded", "ebpf, fast path", columns(
		"rules", "", "rules-ns/packet", "fast path", "", "forward-ns/packet", "with `FastPathPeer`", "", "peer-ns/packet",
		"routed, no Service", "", "routed-ns/packet", "the frame alone", "", "frame-ns/packet", "fast path / rules", "", "forward/rules",
		"with `FastPathPeer` / rules", "", "peer/rules"), []row{{what: "a datagram of an established flow", benchmark: "ebpf.BenchmarkForward"}}},
	{"proxies", "userspace", columns(
		"no proxy", "", "direct-*", "bare splice(2)", "", "limit-*", "serviceplane", "", "ours-*", "nginx, 1 worker", "", "nginx-*",
		"nginx, 2 workers", "", "nginx2-*", "serviceplane / nginx, 1 worker", "", "ours/nginx"), slices.Concat(
		[]row{{what: "throughput of one connection", benchmark: onProxies + "throughput MB/s"}},
		each("connections a second, {clients} clients", onProxies+"connections/clients=# conn/s", "16", "64"),
		each("CPU time of a connection, {clients} clients", onProxies+"connections/clients=# cpu-µs/conn", "16", "64"))},
	{"counting", "", columns(
		"without counts", "off", "off-cpu-ms off-cpu-ns/packet off-cpu-ns/end own-ms",
		"with counts", "on", "cpu-ms cpu-ns/packet cpu-ns/end cpu-ms/reading own-ms ns/op"), []row{
		{what: "nftables: a connection's first packet, CPU time of both ends and the node", benchmark: "internal/nftables.BenchmarkCounts/N=1000/E=10/connections"},
		{what: "nftables: reading 10,000 counters, CPU time", benchmark: "internal/nftables.BenchmarkCounts/N=1000/E=10/reading"},
		{what: "iptables-nft: one endpoint replaced among {N} Services × {E}, without the program's time", benchmark: "iptables.BenchmarkCounts/nft/N=1000/E=10/replaced=1/counts=*"},
		{what: "iptables-legacy: the same", benchmark: "iptables.BenchmarkCounts/legacy/N=1000/E=10/replaced=1/counts=*"},
		{what: "iptables-nft: reading {N} Services", benchmark: "iptables.BenchmarkCounts/nft/N=1000/E=10/reading"},
		{what: "iptables-legacy: the same", benchmark: "iptables.BenchmarkCounts/legacy/N=1000/E=10/reading"},
		{what: "traffic: a datagram of an open flow, CPU time of both ends and the node", benchmark: "nftables.BenchmarkTraffic"},
		{what: "traffic: reading {flows} open connections, CPU time", benchmark: "conntrack.BenchmarkTraffic/flows=100000"},
		{what: "traffic: a connection that ends, CPU time with the kernel's", benchmark: "conntrack.BenchmarkTraffic/ends"},
	}},
	{"memory", "nodeproxy among 10,000 Services × 10 endpoints", columns("lists as streams", "true", "*", "lists whole", "false", "*"), under(onMemory,
		" rest-MiB", "after the first sync", " peak-MiB", "at most, during it", " churn-MiB", "at most, after 1,000 changes a second for 30 s",
		" %core", "CPU time of these changes")},
	{"parts", "", columns("time (floor)", "", "%core "+times, "CPU time", "", cpus, "memory", "", "bytes/client bytes/service B/op", "allocations", "", allocs), slices.Concat([]row{
		{what: "tracking: initial load of {N} Services × {E} endpoints", benchmark: "changetracker.BenchmarkInitialLoad/N=5000/E=10"},
		{what: "tracking: one change among {N} Services", benchmark: "changetracker.BenchmarkOneChangeAmong/N=30000/E=2"},
		{what: "tracking: one endpoint of {E} flips, slices of 100", benchmark: "changetracker.BenchmarkFlipOneEndpoint/E=50000"},
		{what: "the same, until the engine gets the change", benchmark: "desired.BenchmarkHugeService/E=50000"},
		{what: "nftables: the same in the kernel", benchmark: "internal/nftables.BenchmarkHuge/E=50000"},
	}, under(onNFTables+"/",
		"N=5000/E=50/first", "nftables: first sync of {N} Services × {E} endpoints", "N=45000/E=2/first", "nftables: first sync of {N} Services × {E} endpoints",
		"N=10000/E=10/important", "nftables: an important Service answers while {N} are loaded",
		"N=10000/E=10/sustained/rate=1000/seconds=60", "nftables: {rate} changes a second for {seconds} s among {N} Services, 99th percentile"), []row{
		{what: "nftables: one endpoint's weight changed among {N} Services", benchmark: "internal/nftables.BenchmarkBalancing/N=10000/E=10/weight"},
		{what: "nftables: a Service with a consistent hash, {E} endpoints", benchmark: "internal/nftables.BenchmarkBalancing/N=100/E=100/hashed"},
		{what: "nftables: one of its endpoints replaced", benchmark: "internal/nftables.BenchmarkBalancing/N=100/E=100/hashed/replaced=1"},
		{what: "conntrack: {stale} stale flows deleted among {flows}", benchmark: "conntrack.BenchmarkClean/flows=100000/stale=1000"},
		{what: "userspace: an idle TCP connection, of {clients}", benchmark: "userspace.BenchmarkIdle/tcp/clients=1000"},
		{what: "userspace: an idle UDP client, of {clients}", benchmark: "userspace.BenchmarkIdle/udp/clients=1000"},
		{what: "endpointhealth: 1,000 endpoints checked every 10 s by TCP", benchmark: "node/endpointhealth.BenchmarkThousandEndpoints/tcp"},
		{what: "endpointhealth: the same by HTTP, from another network namespace", benchmark: "node/endpointhealth.BenchmarkThousandEndpoints/http/namespace"},
		{what: "tracing: a connection that is not sampled", benchmark: "node/tracing.BenchmarkUnsampledConnection"},
		{what: "debug page: the first request among {N} Services", benchmark: "node/debughttp.BenchmarkServices/N=30000/first"},
		{what: "debug page: a Service by its name", benchmark: "node/debughttp.BenchmarkServices/N=30000/one_name"},
	})},
}

// packets are the ways to an endpoint. Those of iptables grow with the Services, so that they are
// not measured at the largest size.
func packets() []row {
	const of = "internal/packetcost.BenchmarkPackets/N=*/#"
	tables := each("#", of, "iptables-nft", "kube-proxy-iptables-nft", "iptables-legacy", "kube-proxy-iptables-legacy")
	for i := range tables {
		tables[i].none = "30000"
	}
	return append(each("#", of, "nothing", "conntrack", "nftables", "kube-proxy-nftables", "ebpf", "ebpf-without-rules"), tables...)
}

// columns returns the columns that have these heads, places and units, one after the other.
func columns(of ...string) (all []column) {
	for c := range slices.Chunk(of, 3) {
		all = append(all, column{c[0], c[1], c[2]})
	}
	return all
}

// under returns the rows of benchmarks whose names begin alike: how each goes on, and what it is.
func under(prefix string, pairs ...string) (rows []row) {
	for pair := range slices.Chunk(pairs, 2) {
		rows = append(rows, row{what: pair[1], benchmark: prefix + pair[0]})
	}
	return rows
}

// each returns rows that differ in one word.
func each(what, benchmark string, words ...string) (rows []row) {
	for _, word := range words {
		rows = append(rows, row{what: strings.ReplaceAll(what, "#", word), benchmark: strings.ReplaceAll(benchmark, "#", word)})
	}
	return rows
}
