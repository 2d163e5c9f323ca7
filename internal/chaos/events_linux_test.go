package chaos

import (
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/pause"
)

// event is what may happen to a node.
type event struct {
	name    string
	play    func(g *game)
	promise promise
	missing func() string // why it cannot happen here
}

// longest is how long a moment is at most in which anything may happen.
const longest = 500 * time.Millisecond

// allEvents are what may happen to an engine. After each, the proxy that is expected runs.
func allEvents(e engine) []event {
	// Without a proxy, nothing changes for clients, unless connections are those of the process.
	unnoticed := promise{failed: true, reset: true, moved: true, deaf: true}
	death := promise{}
	// A process that ends in peace hands over its connections, but does not know who its clients were.
	handover := promise{failed: true, reset: true, deaf: true}
	full := promise{} // nothing that is new passes
	if e.steady() {
		death, handover = unnoticed, unnoticed
		full = promise{reset: true, moved: true}
	}
	all := []event{
		{name: "nothing", promise: unnoticed, play: func(*game) {}},
		{name: "kill -9, start", promise: death, play: func(g *game) { g.kill(); g.start(g.builds.this()) }},
		{name: "kill -9 while it starts, start", promise: death, play: killedAtStart},
		{name: "kill -9 while it works, start", promise: death, play: killedAtWork},
		{name: "SIGTERM, start", promise: handover, play: func(g *game) { g.stop(); g.start(g.builds.this()) }},
		{name: "the version before, and back", promise: handover, play: func(g *game) {
			g.stop()
			g.start(g.before())
			g.mustFollow()
			g.stop()
			g.start(g.builds.this())
		}},
		{name: "other flags, and back", promise: handover, play: otherFlags},
		{name: "rolling update", promise: unnoticed, play: rollingUpdate},
		{name: "changes without a proxy", promise: death, play: func(g *game) { g.kill(); g.scale(); g.start(g.builds.this()) }},
		{name: "SIGSTOP, changes, SIGCONT", promise: death, play: stopped},
		{name: "API server away", promise: unnoticed, play: apiAway},
		{name: "kill -9, start without the API server", promise: death, play: func(g *game) {
			g.kill()
			g.api.Stop()
			g.start(g.builds.this())
			g.wait(2 * longest)
			g.api.Start(g.t)
		}},
		{name: "no more memory, start", promise: death, play: noMemory},
		{name: "connection tracking is full", promise: full, play: trackingFull},
		{name: "the clock jumps a day ahead, and back", promise: unnoticed, play: clockJumps, missing: notInVM},
		{name: "tables of others come and go", promise: unnoticed, play: foreignTables},
	}
	for _, f := range e.flushes {
		repaired := promise{deaf: e.tellsRepairs}
		if f.kept {
			repaired = unnoticed
		}
		all = append(all, event{name: f.name, promise: repaired, play: func(g *game) { g.shell(f.command) }})
	}
	return all
}

func killedAtStart(g *game) {
	g.kill()
	for range 1 + g.dice.IntN(3) {
		g.start(g.builds.this())
		g.wait(longest)
		g.kill()
	}
	g.start(g.builds.this())
}

// killedAtWork kills the proxy while it programs changes.
func killedAtWork(g *game) {
	for range 1 + g.dice.IntN(3) {
		for range 1 + g.dice.IntN(5) {
			g.scale()
		}
		g.wait(longest / 10)
		g.kill()
		g.start(g.builds.this())
		g.mustFollow()
	}
}

// otherFlags restarts the proxy with another configuration, and back.
func otherFlags(g *game) {
	flags := []string{
		g.engine.bit, "--nodeport-addresses=primary", "--count-connections", "--masquerade-all",
		"--conntrack-tcp-be-liberal", "--config-sync-period=1s",
	}
	flag := flags[g.dice.IntN(len(flags))]
	g.t.Logf("with %s", flag)
	for _, more := range [][]string{{flag}, nil} {
		if g.engine.steady() && g.dice.IntN(2) == 0 {
			g.kill()
		} else {
			g.stop()
		}
		g.start(g.builds.this(), more...)
		g.mustFollow()
	}
}

// scale adds or removes endpoints of the Services. Those at the beginning stay.
func (g *game) scale() {
	g.t.Helper()
	for _, s := range []*service{g.web, g.sticky} {
		pods := g.pods()
		for _, pod := range g.morePods() {
			if g.dice.IntN(2) == 0 && s != g.sticky {
				pods = append(pods, pod)
			}
		}
		g.dice.Shuffle(len(pods), func(i, k int) { pods[i], pods[k] = pods[k], pods[i] })
		g.put(s, pods...)
	}
}

// rollingUpdate replaces the endpoints of the Service without session affinity, one by one.
func rollingUpdate(g *game) {
	old := g.pods()
	for round := range 2 {
		for i := range old {
			pods := append(g.pods(), g.morePods()...)
			gone := (i + round) % len(old)
			g.put(g.web, append(pods[:gone], pods[gone+1:]...)...)
			g.put(g.sticky, append(g.pods(), g.morePods()[:i%2]...)...)
			if g.dice.IntN(2) == 0 {
				g.mustFollow()
			}
		}
	}
	g.put(g.web, g.pods()...)
	g.put(g.sticky, g.pods()...)
}

// stopped lets no time pass for the proxy: when it continues, its clocks have jumped.
func stopped(g *game) {
	if err := g.proxy.Process.Signal(syscall.SIGSTOP); err != nil {
		g.t.Fatalf("send SIGSTOP: %v", err)
	}
	g.scale()
	pause.For(g.t.Context(), 2*time.Second)
	if err := g.proxy.Process.Signal(syscall.SIGCONT); err != nil {
		g.t.Fatalf("send SIGCONT: %v", err)
	}
}

// noMemory lets the proxy, and the programs that it runs, have no more memory than now, while
// it has more and more to do.
func noMemory(g *game) {
	pid := g.proxy.Process.Pid
	if err := unix.Prlimit(pid, unix.RLIMIT_DATA, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}, nil); err != nil {
		g.t.Fatalf("limit the memory of the proxy: %v", err)
	}
	if notInVM() == "" {
		// In a control group, the kernel kills a process that has too much.
		g.shell(fmt.Sprintf(`mkdir -p /run/cgroup
mount -t cgroup2 cgroup2 /run/cgroup
echo +memory >/run/cgroup/cgroup.subtree_control
mkdir -p /run/cgroup/proxy
echo %d >/run/cgroup/proxy/cgroup.procs
echo 1M >/run/cgroup/proxy/memory.max
umount /run/cgroup`, pid))
	}
	for range 20 {
		g.scale()
		g.mark()
	}
	g.wait(2 * longest)
	select {
	case <-g.proxy.ended:
		g.t.Logf("the proxy has ended: %v", g.proxy.err)
	default:
		g.t.Log("the proxy still runs")
	}
	g.kill()
	g.start(g.builds.this())
}

// notInVM says why something cannot happen to this machine.
func notInVM() string {
	if exists(inVM) {
		return ""
	}
	return "only in a virtual machine"
}

// clockJumps sets the clock of the machine.
func clockJumps(g *game) {
	const day = 24 * 60 * 60
	for _, jump := range []int64{day, -day} {
		var now unix.Timeval
		if err := unix.Gettimeofday(&now); err != nil {
			g.t.Fatalf("read the clock: %v", err)
		}
		now.Sec += jump
		if err := unix.Settimeofday(&now); err != nil {
			g.t.Fatalf("set the clock: %v", err)
		}
		g.scale()
		g.mustFollow()
	}
}

func apiAway(g *game) {
	g.api.Stop()
	g.scale()
	g.wait(4 * longest)
	if g.dice.IntN(2) == 0 {
		g.api.Compact() // watches cannot resume
	}
	g.api.Start(g.t)
}

// foreignTables does what firewalls and container engines do when they start and end.
func foreignTables(g *game) {
	const nft = `nft -f - <<END
table inet firewall
delete table inet firewall
table inet firewall {
	set known { type inet_service; elements = { 22, 80 } }
	chain input { type filter hook input priority 10; policy accept; tcp dport @known accept; }
	chain forward { type filter hook forward priority 10; policy accept; ct state established,related accept; }
	chain before { type nat hook prerouting priority -90; policy accept; }
	chain after { type nat hook postrouting priority 110; policy accept; oifname "nowhere" masquerade; }
}
END
`
	const iptables = `for i in iptables ip6tables; do
$i -t nat -N CONTAINERS
$i -t nat -I PREROUTING -m addrtype --dst-type LOCAL -j CONTAINERS
$i -t nat -I OUTPUT -m addrtype --dst-type LOCAL -j CONTAINERS
$i -t nat -A CONTAINERS -i nowhere -j RETURN
$i -N CONTAINERS
$i -I FORWARD -j CONTAINERS
done
`
	const gone = `for i in iptables ip6tables; do
for c in PREROUTING OUTPUT; do $i -t nat -D $c -m addrtype --dst-type LOCAL -j CONTAINERS; done
$i -t nat -F CONTAINERS; $i -t nat -X CONTAINERS
$i -D FORWARD -j CONTAINERS; $i -X CONTAINERS
done
`
	g.shell(nft + iptables)
	for range 2 + g.dice.IntN(5) {
		g.wait(longest / 5)
		g.shell([]string{nft, gone + iptables}[g.dice.IntN(2)])
	}
	g.shell("nft delete table inet firewall\n" + gone)
}
