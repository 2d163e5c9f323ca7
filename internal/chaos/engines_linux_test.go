package chaos

// flush is a command of another program that deletes what connections need.
type flush struct{ name, command string }

// engine is a mode of nodeproxy.
type engine struct {
	name    string
	variant string // of iptables, that the node has
	flags   []string
	flushes []flush // what another program may do to the rules
	// lingers means that connections are those of the process: after SIGTERM it goes on with
	// them, while the next one starts.
	lingers bool
	// tellsRepairs means that no repair goes unnoticed, and so all flows are checked after it.
	// The engine ipvs also repairs while it applies a full update, and does not say so.
	tellsRepairs bool
	// lossy means that a datagram of the node fails with EPERM when its endpoint went just now, and
	// the next one does not (TestADatagramAfterItsServerWentIsLost of ipvs). Rules of the other
	// engines drop no datagram of the clients: for them, EPERM is a failure.
	lossy bool
	// bit is the flag of the mark's bit.
	bit string
}

func engines() []engine {
	ruleset := flush{"`nft flush ruleset`", "nft flush ruleset"}
	tables := flush{"`nft delete table` of ours", "nft delete table ip kube-proxy; nft delete table ip6 kube-proxy"}
	nat := flush{"`iptables -t nat -F`", "iptables -t nat -F; ip6tables -t nat -F"}
	all := flush{"`iptables -F`, `-X` in all tables", "for i in iptables ip6tables; do for t in nat filter mangle; do $i -t $t -F; $i -t $t -X; done; done"}
	servers := flush{"`ipvsadm -C`", "ipvsadm -C"}
	device := flush{"`ip link delete kube-ipvs0`", "ip link delete kube-ipvs0"}
	return []engine{
		{
			name: "nftables", variant: "nft", flags: []string{"--proxy-mode=nftables", "--nftables-min-sync-period=0s"},
			flushes: []flush{ruleset, tables}, tellsRepairs: true, bit: "--nftables-masquerade-bit=20",
		},
		{
			name: "iptables-nft", variant: "nft", flags: []string{"--proxy-mode=iptables", "--iptables-min-sync-period=0s"},
			flushes: []flush{ruleset, nat, all}, tellsRepairs: true, bit: "--iptables-masquerade-bit=20",
		},
		{
			name: "iptables-legacy", variant: "legacy", flags: []string{"--proxy-mode=iptables", "--iptables-min-sync-period=0s"},
			flushes: []flush{nat, all}, tellsRepairs: true, bit: "--iptables-masquerade-bit=20",
		},
		{
			name: "userspace", variant: "nft", lingers: true,
			flags:   []string{"--proxy-mode=userspace", "--nftables-min-sync-period=0s", "--userspace-linger=10m", "--udp-timeout=2s"},
			flushes: []flush{ruleset, tables}, tellsRepairs: true, bit: "--nftables-masquerade-bit=20",
		},
		{
			name: "ipvs", variant: "nft", flags: []string{"--proxy-mode=ipvs", "--ipvs-min-sync-period=0s"},
			flushes: []flush{ruleset, servers, device}, lossy: true, bit: "--iptables-masquerade-bit=20",
		},
	}
}

// missing says why the engine does not work here.
func (e engine) missing() string {
	if e.name != "ipvs" {
		return ""
	}
	if notInVM() == "" || exists("/proc/net/ip_vs") {
		return ""
	}
	return "this kernel has no IPVS: run it in a virtual machine"
}

// steady reports whether connections do not need the process.
func (e engine) steady() bool { return !e.lingers }
