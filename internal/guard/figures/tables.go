package main

import "slices"

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
	units []string // the first one that the benchmark has is shown; "*" is the row's unit
}

// row is one case. Sizes in braces are taken from the benchmark's name.
type row struct {
	what      string
	benchmark string
	unit      string
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
	onSizes    = onNFTables + "/N=*/E=10/"

	onMemory     = "nodeproxy.BenchmarkMemory/N=10000/E=10/streamed=*"
	onSocketMaps = "ebpf.BenchmarkSockets/N=*/E=10/"
	onEvents     = "nodeproxy.BenchmarkEventToPacket"
)

var (
	times  = []string{"ms", "ns/op"}            // read-only
	allocs = []string{"allocs/op"}              // read-only
	cpus   = []string{"cpu-ms"}                 // read-only
	sizes  = []string{"ms", "ns/op", "heap-MB"} // read-only
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
	{
		name: "engines", about: "time (floor)",
		columns: []column{
			{"nftables", onNFTables, times},
			{"iptables-legacy", onLegacy, times},
			{"iptables-nft", onNFTool, times},
			{"ipvs, fake kernel", onIPVS, times},
			{"userspace", onSockets, times},
			{"userspace, portals of nftables", onPortals, times},
		},
		rows: syncs,
	},
	{
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
		rows: syncs,
	},
	{
		name: "sizes", about: "nftables: time (floor)",
		columns: []column{{"1,000 Services", "1000", sizes}, {"5,000", "5000", sizes}, {"10,000", "10000", sizes}, {"30,000", "30000", sizes}},
		rows: []row{
			{what: "first sync, {E} endpoints each", benchmark: onSizes + "first"},
			{what: "one endpoint replaced", benchmark: onSizes + "replaced=1"},
			{what: "full sync, nothing changed", benchmark: onSizes + "full"},
			{what: "restart on the populated kernel", benchmark: onSizes + "restart"},
			{what: "the table deleted by another program, all of it restored", benchmark: onSizes + "deleted"},
			{what: "longest wait of another writer during the first sync", benchmark: onSizes + "wait"},
			{what: "live heap afterwards, without the informers' objects", benchmark: onSizes + "heap"},
		},
	},
	{
		name: "waits", about: "nftables",
		columns: []column{{"time (floor)", "", times}, {"CPU time", "", cpus}},
		rows: []row{
			{what: "first sync of {N} Services × {E} endpoints", benchmark: onNFTables + "/N=5000/E=50/first"},
			{what: "first sync of {N} Services × {E} endpoints", benchmark: onNFTables + "/N=45000/E=2/first"},
			{what: "an important Service answers while {N} are loaded", benchmark: onNFTables + "/N=10000/E=10/important"},
			{what: "a lone change among {N} Services is in the kernel, 99th percentile", benchmark: onNFTables + "/N=10000/E=10/lone"},
			{what: "{rate} changes a second for {seconds} s among {N} Services, 99th percentile", benchmark: onNFTables + "/N=10000/E=10/sustained/rate=1000/seconds=60"},
		},
	},
	{
		name: "large", about: "nftables",
		columns: []column{{"time (floor)", "", sizes}},
		rows: []row{
			{what: "first sync of {N} Services × {E} endpoints", benchmark: "internal/nftables.BenchmarkLarge/N=100000/E=10/first"},
			{what: "one endpoint replaced", benchmark: "internal/nftables.BenchmarkLarge/N=100000/E=10/replaced=1"},
			{what: "full sync, nothing changed", benchmark: "internal/nftables.BenchmarkLarge/N=100000/E=10/full"},
			{what: "restart on the populated kernel", benchmark: "internal/nftables.BenchmarkLarge/N=100000/E=10/restart"},
			{what: "live heap afterwards, without the informers' objects", benchmark: "internal/nftables.BenchmarkLarge/N=100000/E=10/heap"},
		},
	},
	{
		name: "huge", about: "one endpoint of a Service flips",
		columns: []column{{"100 endpoints", "100", times}, {"5,000", "5000", times}, {"memory", "5000", []string{"B/op"}}, {"50,000", "50000", times}, {"memory", "50000", []string{"B/op"}}},
		rows: []row{
			{what: "tracking, slices of 100", benchmark: "changetracker.BenchmarkFlipOneEndpoint/E=*"},
			{what: "from the event to what the engine gets", benchmark: "desired.BenchmarkHugeService/E=*"},
			{what: "nftables, with the kernel", benchmark: "internal/nftables.BenchmarkHuge/E=*"},
		},
	},
	{
		name: "events", about: "nodeproxy, mode nftables, 10 endpoints of each Service",
		columns: []column{{"median", "", times}, {"99th percentile", "", []string{"p99-ms"}}, {"CPU time of nodeproxy for a change", "", cpus}, {"connections meanwhile", "", []string{"connections"}}, {"failed", "", []string{"failed"}}},
		rows: []row{
			{what: "a lone change among {N} Services", benchmark: onEvents + "/N=1000/E=10/lone"},
			{what: "a lone change among {N} Services", benchmark: onEvents + "/N=10000/E=10/lone"},
			{what: "a lone change among {N} Services", benchmark: onEvents + "/N=30000/E=10/lone"},
			{what: "beside 100 changes a second among {N}", benchmark: onEvents + "/N=1000/E=10/busy"},
			{what: "beside 100 changes a second among {N}", benchmark: onEvents + "/N=10000/E=10/busy"},
			{what: "beside 100 changes a second among {N}", benchmark: onEvents + "/N=30000/E=10/busy"},
			{what: "a change while nodeproxy is dead, after its start among {N}", benchmark: onEvents + "/N=10000/E=10/killed"},
			{what: "a change while nodeproxy is dead, after its start among {N}", benchmark: onEvents + "/N=30000/E=10/killed"},
		},
	},
	{
		name: "packets", about: "median",
		columns: []column{
			{"connect", "", []string{"connect-ms"}},
			{"99th percentile", "", []string{"connect-p99-ms"}},
			{"node port", "", []string{"connect-node-port-ms"}},
			{"load balancer", "", []string{"connect-load-balancer-ms"}},
			{"TCP request", "", []string{"rr-ms"}},
			{"connection with a request", "", []string{"crr-ms"}},
			{"UDP request", "", []string{"udp-ms"}},
			{"throughput", "", []string{"MB/s"}},
			{"datagrams a second", "", []string{"packet/s"}},
			{"first packet, CPU time", "", []string{"first-ms"}},
		},
		rows: packets(),
	},
	{
		name: "sockets", about: "ebpf, IPv4, 10 endpoints of each Service",
		columns: []column{{"10,000 Services", "10000", []string{"*"}}, {"30,000", "30000", []string{"*"}}, {"100,000", "100000", []string{"*"}}},
		rows: []row{
			{what: "first sync: what sockets add", benchmark: onSocketMaps + "first", unit: "ms"},
			{what: "first sync: the rules below", benchmark: onSocketMaps + "first", unit: "rules-ms"},
			{what: "restart, nothing changed: what sockets add", benchmark: onSocketMaps + "restart", unit: "ms"},
			{what: "restart: the rules below", benchmark: onSocketMaps + "restart", unit: "rules-ms"},
			{what: "restart: what is written to maps", benchmark: onSocketMaps + "restart", unit: "writes"},
			{what: "one endpoint replaced, in the maps", benchmark: onSocketMaps + "replaced=1", unit: "ns/change"},
			{what: "memory of the maps, all counted", benchmark: onSocketMaps + "memory", unit: "maps-MiB"},
			{what: "connect(2): the program", benchmark: onSocketMaps + "hook", unit: "ns/connect"},
			{what: "the same with RealPeer", benchmark: onSocketMaps + "hook/real-peer", unit: "ns/connect"},
		},
	},
	{
		name: "forwarded", about: "ebpf, fast path",
		columns: []column{
			{"rules", "", []string{"rules-ns/packet"}},
			{"fast path", "", []string{"forward-ns/packet"}},
			{"with `Forward.Peer`", "", []string{"peer-ns/packet"}},
			{"routed, no Service", "", []string{"routed-ns/packet"}},
			{"the frame alone", "", []string{"frame-ns/packet"}},
			{"fast path / rules", "", []string{"forward/rules"}},
			{"with `Forward.Peer` / rules", "", []string{"peer/rules"}},
		},
		rows: []row{{what: "a datagram of an established flow", benchmark: "ebpf.BenchmarkForward"}},
	},
	{
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
			{what: "CPU time of a connection, {clients} clients", benchmark: "userspace.BenchmarkProxies/connections/clients=16", unit: "cpu-µs/conn"},
			{what: "CPU time of a connection, {clients} clients", benchmark: "userspace.BenchmarkProxies/connections/clients=64", unit: "cpu-µs/conn"},
		},
	},
	{
		name: "counting", about: "",
		columns: []column{
			{"without counts", "off", []string{"off-cpu-ms", "off-cpu-ns/packet", "off-cpu-ns/end", "own-ms"}},
			{"with counts", "on", []string{"cpu-ms", "cpu-ns/packet", "cpu-ns/end", "cpu-ms/reading", "own-ms", "ns/op"}},
		},
		rows: []row{
			{what: "nftables: first sync of {N} Services × {E} endpoints, CPU time", benchmark: "internal/nftables.BenchmarkCounts/N=10000/E=10/first"},
			{what: "nftables: a connection's first packet, CPU time of both ends and the node", benchmark: "internal/nftables.BenchmarkCounts/N=1000/E=10/connections"},
			{what: "nftables: reading 10,000 counters, CPU time", benchmark: "internal/nftables.BenchmarkCounts/N=1000/E=10/reading"},
			{what: "iptables-nft: one endpoint replaced among {N} Services × {E}, without the program's time", benchmark: "iptables.BenchmarkCounts/nft/N=1000/E=10/replaced=1/counts=*"},
			{what: "iptables-legacy: the same", benchmark: "iptables.BenchmarkCounts/legacy/N=1000/E=10/replaced=1/counts=*"},
			{what: "iptables-nft: reading {N} Services", benchmark: "iptables.BenchmarkCounts/nft/N=1000/E=10/reading"},
			{what: "iptables-legacy: reading {N} Services", benchmark: "iptables.BenchmarkCounts/legacy/N=1000/E=10/reading"},
			{what: "traffic: a datagram of an open flow, CPU time of both ends and the node", benchmark: "nftables.BenchmarkTraffic"},
			{what: "traffic: reading {flows} open connections, CPU time", benchmark: "conntrack.BenchmarkTraffic/flows=100000"},
			{what: "traffic: a connection that ends, CPU time with the kernel's", benchmark: "conntrack.BenchmarkTraffic/ends"},
		},
	},
	{
		name: "lists", about: "",
		columns: []column{{"time", "", times}, {"CPU time", "", cpus}, {"memory", "", []string{"B/op"}}},
		rows: []row{
			{what: "the first request among {N} Services", benchmark: "debughttp.BenchmarkServices/N=30000/first"},
			{what: "the first page of all of them", benchmark: "debughttp.BenchmarkServices/N=30000/everything"},
			{what: "their last page", benchmark: "debughttp.BenchmarkServices/N=30000/last_page"},
			{what: "1,000 of them", benchmark: "debughttp.BenchmarkServices/N=30000/most"},
			{what: "one by its name", benchmark: "debughttp.BenchmarkServices/N=30000/one_name"},
			{what: "one by its endpoint", benchmark: "debughttp.BenchmarkServices/N=30000/one_endpoint"},
			{what: "those without endpoints", benchmark: "debughttp.BenchmarkServices/N=30000/filter"},
			{what: "the first page after a change", benchmark: "debughttp.BenchmarkServices/N=30000/changed"},
		},
	},
	{
		name: "memory", about: "nodeproxy among 10,000 Services × 10 endpoints",
		columns: []column{{"lists as streams", "true", []string{"*"}}, {"lists whole", "false", []string{"*"}}},
		rows: []row{
			{what: "after the first sync", benchmark: onMemory, unit: "rest-MiB"},
			{what: "at most, during it", benchmark: onMemory, unit: "peak-MiB"},
			{what: "at most, after 1,000 changes a second for 30 s", benchmark: onMemory, unit: "churn-MiB"},
			{what: "CPU time of these changes", benchmark: onMemory, unit: "%core"},
			{what: "of it for collections of garbage", benchmark: onMemory, unit: "gc-%core"},
		},
	},
	{
		name: "parts", about: "",
		columns: []column{{"time", "", append([]string{"%core"}, times...)}, {"memory", "", []string{"bytes/client", "bytes/service", "B/op"}}, {"allocations", "", allocs}},
		rows: []row{
			{what: "tracking: one endpoint of {E} flipped", benchmark: "changetracker.BenchmarkFlipOneEndpoint/E=5000"},
			{what: "tracking: one change among {N} Services", benchmark: "changetracker.BenchmarkOneChangeAmong/N=30000/E=2"},
			{what: "tracking: initial load of {N} Services × {E} endpoints", benchmark: "changetracker.BenchmarkInitialLoad/N=5000/E=10"},
			{what: "nftables: one endpoint's weight changed among {N} Services", benchmark: "internal/nftables.BenchmarkBalancing/N=10000/E=10/weight"},
			{what: "nftables: a Service with a consistent hash, {E} endpoints", benchmark: "internal/nftables.BenchmarkBalancing/N=100/E=100/hashed"},
			{what: "nftables: one of its endpoints replaced", benchmark: "internal/nftables.BenchmarkBalancing/N=100/E=100/hashed/replaced=1"},
			{what: "maglev: the table of 100 endpoints", benchmark: "maglev.BenchmarkTable/100_endpoints"},
			{what: "endpointhealth: 1,000 endpoints checked every 10 s by TCP", benchmark: "endpointhealth.BenchmarkThousandEndpoints/tcp"},
			{what: "endpointhealth: the same by HTTP", benchmark: "endpointhealth.BenchmarkThousandEndpoints/http"},
			{what: "endpointhealth: by TCP, from another network namespace", benchmark: "endpointhealth.BenchmarkThousandEndpoints/tcp/namespace"},
			{what: "endpointhealth: by HTTP, from there", benchmark: "endpointhealth.BenchmarkThousandEndpoints/http/namespace"},
			{what: "conntrack: {stale} stale flows deleted among {flows}", benchmark: "conntrack.BenchmarkClean/flows=100000/stale=1000"},
			{what: "userspace: an idle TCP connection, of {clients}", benchmark: "userspace.BenchmarkIdle/tcp/clients=1000"},
			{what: "userspace: an idle UDP client, of {clients}", benchmark: "userspace.BenchmarkIdle/udp/clients=1000"},
			{what: "tracing: a connection that is not sampled", benchmark: "tracing.BenchmarkUnsampledConnection"},
		},
	},
}

// packets are the ways to an endpoint. Those of iptables grow with the Services, so that they are
// not measured at the largest size; userspace needs a socket for each.
func packets() (rows []row) {
	always := []string{"nothing", "conntrack", "nftables", "ebpf", "ebpf-without-rules", "kube-proxy-nftables"}
	tables := []string{"iptables-nft", "kube-proxy-iptables-nft", "iptables-legacy", "kube-proxy-iptables-legacy"}
	for _, of := range []struct {
		services string
		ways     []string
	}{{"10", slices.Concat(always, tables, []string{"userspace"})}, {"10000", slices.Concat(always, tables)}, {"30000", always}} {
		for _, way := range of.ways {
			rows = append(rows, row{what: "{N} Services: " + way, benchmark: "internal/packetcost.BenchmarkPackets/N=" + of.services + "/" + way})
		}
	}
	return rows
}
