package nodeproxy

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// connections is how many connections TestNoConnectionIsCut makes and holds in each change
// of mode at least.
var connections = flag.Int("connections", 400, "connections in each change of mode")

const (
	bothProtocols = `apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: NodePort
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  ports:
  - {name: tcp, port: 80, targetPort: 8080, nodePort: 30080}
  - {name: udp, port: 53, targetPort: 8080, nodePort: 30053, protocol: UDP}
`
	kubeProxyIPVS = "kube-proxy's ipvs"
)

// maxHeld is how many of them stay open at most: each must exchange bytes before it times out.
const maxHeld = 800

// udpTimeout is the timeout of UDP flows in seconds: at the end the test waits for it.
func udpTimeout() int { return 20 + *connections/250 }

// inVM reports whether the kernel has IPVS: that of the virtual machines has.
func inVM() bool { return os.Getenv("SERVICEPLANE_VM") != "" }

// modeChange is a change from one mode to another, and what it does.
type modeChange struct {
	from, to               string
	held, made             int64
	cut, refused, leftOver int64
}

// A change of mode cuts no open connection and refuses no new one, while the proxy of one mode ends and the proxy
// of another mode starts. When open connections end, nothing of the old mode is left. A process of mode userspace
// lingers while the next one starts.
func TestNoConnectionIsCut(t *testing.T) {
	var all []string
	for _, m := range modes() {
		all = append(all, string(m))
	}
	var pairs []modeChange
	for _, from := range append(all, kubeProxyIPVS) {
		for _, to := range all {
			ipvs := strings.Contains(from+to, string(modeIPVS))
			if inVM() && strings.Contains(from+to, string(modeEBPF)) {
				continue
			}
			if from == to || ipvs != inVM() || from == kubeProxyIPVS && to != string(modeNFTables) {
				continue // the other kernel runs it
			}
			pairs = append(pairs, modeChange{from: from, to: to})
		}
	}
	table := pairs
	if !inVM() { // which run the pairs that their command names
		table = chance.Some(t, len(pairs)/2, pairs...)
	}
	for i := range table {
		m := &table[i]
		t.Run(m.from+" to "+m.to, m.run)
	}
	var text strings.Builder
	for _, m := range table {
		fmt.Fprintf(&text, "| %s | %s | %d | %d | %d | %d | %d |\n", m.from, m.to, m.held, m.made, m.cut, m.refused, m.leftOver)
	}
	t.Logf("changes of mode:\n| from | to | held | new | cut | refused | left over |\n%s", &text)
}

func (m *modeChange) run(t *testing.T) {
	c, d := newSmall(t), newDirectory(t)
	netnstest.Check(t, errors.Join( // for the node's own connections to VIPs
		c.node.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("192.0.2.1")),
		c.node.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr("2001:db8::1"))))
	d.write("service.yaml", bothProtocols)
	// With one endpoint, a connection could go on by chance.
	d.write("endpoints.yaml", strings.NewReplacer("ports: [{port: 8080}]", "ports: [{name: tcp, port: 8080}, {name: udp, port: 8080, protocol: UDP}]",
		podAddr(1, 4)+`"]`, podAddr(1, 4)+`"]}, {addresses: ["`+podAddr(2, 4)+`"]`,
		podAddr(1, 6)+`"]`, podAddr(1, 6)+`"]}, {addresses: ["`+podAddr(2, 6)+`"]`).Replace(webSlices(1)))
	flags := []string{"--manifests=" + d.path, "--state-dir=" + t.TempDir(), "--nodeport-addresses=0.0.0.0/0,::/0", fmt.Sprintf("--ipvs-udp-timeout=%ds", udpTimeout()), "--udp-timeout=20s", "--userspace-linger=10m"}
	var b *bpfWorld
	if !inVM() { // the oldest kernel lacks what mode ebpf needs
		b = newBPFWorld(t)
		b.within() // also the clients: sockets at once, or not
		flags = append(flags, b.flags()...)
	}
	if strings.Contains(m.from+m.to, string(modeEBPF)) { // which must know pods
		flags = append(flags, "--cluster-cidr=10.244.0.0/16,fd00:244::/32")
	}
	var old *proxyProcess
	if m.from == kubeProxyIPVS {
		c.likeKubeProxy()
	} else {
		old = start(t, c.node, append(flags, "--proxy-mode="+m.from)...)
		old.waitHealthy()
	}
	targets := c.targets()
	each := max(min(*connections/5, maxHeld)/len(targets), 1)
	f := newTraffic(t, each, targets)
	m.held = int64(each * len(targets))
	wait := func(share int64) {
		want := f.made.Load() + (int64(*connections)-m.held)/share
		f.reach(t, "new connections", &f.made, func() int64 { return want })
	}
	wait(3)
	t.Logf("%d new connections: the old proxy ends", f.made.Load())
	lingers := m.from == string(modeUserspace)
	if old != nil {
		netnstest.Check(t, old.cmd.Process.Signal(syscall.SIGTERM))
		if !lingers {
			old.wait()
		}
	}
	next := start(t, c.node, append(flags, "--proxy-mode="+m.to)...)
	next.waitHealthy()
	t.Logf("%d new connections: the new proxy has synced", f.made.Load())
	if strings.HasSuffix(m.from, string(modeIPVS)) {
		const families = 2
		poll.Until(t, "connections drain", func() bool {
			return strings.Count(next.stderr(), "connections of the previous mode may end") == families
		})
	}
	wait(3)
	round := f.exchanged.Load()
	f.reach(t, "exchange over all connections", &f.exchanged, func() int64 {
		f.mu.Lock()
		defer f.mu.Unlock()
		return round + 2*(m.held-int64(f.cut))
	})
	wait(3)
	if m.to == string(modeEBPF) && (next.sample(translated4) < 1 || next.sample(translated6) < 1) {
		t.Errorf("%v and %v sockets translated, want some: the clients are in the cgroup", next.sample(translated4), next.sample(translated6))
	}
	f.end()
	if old != nil {
		if old.wait(); old.err != nil {
			t.Errorf("the old proxy ends with %v, want exit code 0", old.err)
		}
	}
	m.made, m.refused, m.cut = f.made.Load(), f.refused.Load(), int64(f.cut)
	t.Logf("%d new connections, %d refused, %d cut: waiting until nothing is left over", m.made, m.refused, m.cut)
	m.leftOver = c.waitLeftOver(m.to)
	if b != nil {
		poll.Until(t, "links are there in mode ebpf alone", func() bool { return b.isClean() == (m.to != string(modeEBPF)) })
	}
	if m.cut > 0 || m.refused > 0 || m.leftOver > 0 {
		t.Errorf("%d of %d connections cut, %d of %d new ones refused, %d objects left over, want none:\n%s\n%s",
			m.cut, m.held, m.refused, m.made+m.refused, m.leftOver, strings.Join(f.errs, "\n"), strings.Join(c.leftOver(m.to), "\n"))
	}
}

// targets returns frontends of both IP families and protocols, for clients outside and on
// the node.
func (c *small) targets() []target {
	c.t.Helper()
	other4, other6 := netip.MustParseAddr("192.0.2.21"), netip.MustParseAddr("2001:db8::21") // for node ports
	netnstest.Check(c.t, c.client.AddAddrs("eth0", netip.PrefixFrom(other4, 24), netip.PrefixFrom(other6, 64)))
	return []target{
		{from: c.client, network: "tcp", address: vip4},
		{from: c.client, network: "tcp", address: vip6, source: netip.MustParseAddr("2001:db8::1")},
		{from: c.client, network: "tcp", address: nodePort, source: other4},
		{from: c.client, network: "udp", address: "10.96.0.10:53"},
		{from: c.node, network: "tcp", address: vip4},
		{from: c.node, network: "tcp", address: vip6},
		{from: c.client, network: "tcp", address: "[2001:db8::10]:30080", source: other6},
		{from: c.client, network: "udp", address: "[fd00:96::10]:53", source: netip.MustParseAddr("2001:db8::1")},
	}
}

// waitLeftOver waits until nothing is left of other modes than this one, and returns how
// many objects there are.
func (c *small) waitLeftOver(m string) int64 {
	c.t.Helper()
	end := time.Now().Add(3 * time.Minute)
	for len(c.leftOver(m)) > 0 && time.Now().Before(end) {
		poll.Soon(func() bool { return len(c.leftOver(m)) == 0 })
	}
	return int64(len(c.leftOver(m)))
}

// leftOver returns the objects of other modes than this one.
func (c *small) leftOver(m string) (objects []string) {
	c.t.Helper()
	for _, o := range []struct {
		command string
		ours    func(line string) bool
		of      []mode
	}{
		{"nft list tables", func(line string) bool {
			return strings.HasPrefix(line, "table ip kube-proxy") || strings.HasPrefix(line, "table ip6 kube-proxy")
		}, []mode{modeNFTables, modeEBPF, modeUserspace, modeIPVS}},
		{"for v in nft legacy; do iptables-$v-save; ip6tables-$v-save; done", func(line string) bool {
			return strings.HasPrefix(line, ":KUBE-") && !strings.HasPrefix(line, ":KUBE-IPVS-HEALTH ")
		}, []mode{modeIPTables}},
		{"for v in nft legacy; do iptables-$v-save; ip6tables-$v-save; done", func(line string) bool { return strings.HasPrefix(line, ":KUBE-IPVS-HEALTH ") }, []mode{modeIPVS}},
		{"ip addr", func(line string) bool {
			return strings.Contains(line, ": kube-ipvs0") || strings.Contains(line, "inet") && isVIP(line)
		}, []mode{modeIPVS}},
		{"ip route show table local; ip -6 route show table local", isVIP, []mode{modeIPVS}},
		{"! test -e /proc/net/ip_vs || cat /proc/net/ip_vs", func(line string) bool { return strings.HasPrefix(line, "TCP") || strings.HasPrefix(line, "UDP") }, []mode{modeIPVS}},
		{"ipset list -n", func(line string) bool { return strings.HasPrefix(line, "KUBE-") }, nil},
		{"nft list tables", func(line string) bool { return strings.Contains(line, " kube-proxy.ipvs") }, []mode{modeIPVS}},
		{"nft list tables", func(line string) bool { return strings.Contains(line, " kube-proxy.ipvs-leaving") }, nil},
	} {
		if !slices.Contains(o.of, mode(m)) {
			objects = append(objects, c.lines(o.command, o.ours)...)
		}
	}
	return objects
}

func isVIP(line string) bool {
	return strings.Contains(line, "10.96.0.") || strings.Contains(line, "fd00:96::")
}

// lines runs a command in the node, and returns the lines of its output that are ours.
func (c *small) lines(command string, ours func(string) bool) (lines []string) {
	c.t.Helper()
	out := c.shell(command)
	for line := range strings.Lines(out) {
		if ours(line) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// shell runs a command in the node.
func (c *small) shell(command string) string {
	c.t.Helper()
	var out []byte
	netnstest.Check(c.t, c.node.Do(func() (err error) {
		shell := exec.Command("sh", "-c", command)
		shell.Stderr = os.Stderr
		out, err = shell.Output()
		return err
	}))
	return string(out)
}

// likeKubeProxy makes what kube-proxy of mode ipvs has on a node: settings, the device with
// the VIPs, virtual servers, ipsets, and chains.
func (c *small) likeKubeProxy() {
	c.t.Helper()
	var b strings.Builder
	b.WriteString(`set -e
modprobe ip_vs; modprobe ip_vs_rr
for s in conntrack expire_nodest_conn expire_quiescent_template; do echo 1 >/proc/sys/net/ipv4/vs/$s; done
ip link add kube-ipvs0 type dummy
ip addr add 10.96.0.10/32 dev kube-ipvs0
ip -6 addr add fd00:96::10/128 dev kube-ipvs0
`)
	for _, server := range []string{
		"-t 10.96.0.10:80 10.244.1.2", "-t [fd00:96::10]:80 [fd00:244:1::2]", "-t 192.0.2.10:30080 10.244.1.2", "-t [2001:db8::10]:30080 [fd00:244:1::2]",
		"-u 10.96.0.10:53 10.244.1.2", "-u [fd00:96::10]:53 [fd00:244:1::2]", "-u 192.0.2.10:30053 10.244.1.2", "-u [2001:db8::10]:30053 [fd00:244:1::2]",
	} {
		f := strings.Fields(server)
		fmt.Fprintf(&b, "ipvsadm -A %s %s -s rr\n", f[0], f[1])
		for _, pod := range []string{f[2], strings.NewReplacer("244.1.", "244.2.", "244:1:", "244:2:").Replace(f[2])} {
			fmt.Fprintf(&b, "ipvsadm -a %s %s -r %s:8080 -m -w 1\n", f[0], f[1], pod)
		}
	}
	fmt.Fprintf(&b, "ipvsadm --set 900 120 %d\n", udpTimeout())
	for _, family := range []struct{ prefix, inet, iptables, vip, pod string }{
		{"KUBE-", "inet", "iptables-nft", "10.96.0.10", "10.244.1.2"}, {"KUBE-6-", "inet6", "ip6tables-nft", "fd00:96::10", "fd00:244:1::2"},
	} {
		script := strings.NewReplacer("PREFIX", family.prefix, "INET", family.inet, "IPTABLES", family.iptables, "VIP", family.vip, "POD", family.pod).Replace(kubeProxyScript)
		b.WriteString(script)
	}
	c.shell(b.String())
}

// kubeProxyScript makes the ipsets and chains of one IP family. Names have at most 31 bytes.
const kubeProxyScript = `
for s in CLUSTER-IP EXTERNAL-IP EXTERNAL-IP-LOCAL LOAD-BALANCER LOAD-BALANCER-LOCAL LOAD-BALANCER-FW NODE-PORT-SCTP-HASH NODE-PORT-LOCAL-SCTP-HASH; do
  ipset create $(echo PREFIX$s | head -c 31) hash:ip,port family INET
done
for s in LOOP-BACK LOAD-BALANCER-SOURCE-IP; do ipset create PREFIX$s hash:ip,port,ip family INET; done
ipset create $(echo PREFIXLOAD-BALANCER-SOURCE-CIDR | head -c 31) hash:ip,port,net family INET
for s in NODE-PORT-TCP NODE-PORT-LOCAL-TCP NODE-PORT-UDP NODE-PORT-LOCAL-UDP HEALTH-CHECK-NODE-PORT; do
  ipset create PREFIX$s bitmap:port range 0-65535
done
ipset create PREFIXIPVS-IPS hash:ip family INET
ipset add PREFIXCLUSTER-IP VIP,tcp:80
ipset add PREFIXCLUSTER-IP VIP,udp:53
ipset add PREFIXNODE-PORT-TCP 30080
ipset add PREFIXNODE-PORT-UDP 30053
ipset add PREFIXIPVS-IPS VIP
ipset add PREFIXLOOP-BACK POD,tcp:8080,POD
IPTABLES-restore --noflush <<END
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m set --match-set PREFIXLOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -m set --match-set PREFIXCLUSTER-IP src,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set PREFIXCLUSTER-IP dst,dst -j ACCEPT
-A KUBE-NODE-PORT -p tcp -m set --match-set PREFIXNODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p udp -m set --match-set PREFIXNODE-PORT-UDP dst -j KUBE-MARK-MASQ
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -j KUBE-PROXY-FIREWALL
-A INPUT -j KUBE-NODE-PORT
-A INPUT -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-A OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-NODE-PORT -m set --match-set PREFIXHEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-PROXY-FIREWALL -m set --match-set PREFIXLOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
-A KUBE-IPVS-FILTER -m set --match-set PREFIXCLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set PREFIXIPVS-IPS dst -j REJECT
COMMIT
END
`
