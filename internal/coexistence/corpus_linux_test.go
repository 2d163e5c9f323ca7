package coexistence

// foreign is one program that writes rules, in one of its ways.
type foreign struct {
	name string
	// about is what its rules do.
	about string
	// made is "itself, VERSION" or "file, VERSION".
	made string
	// file is the name in testdata, without suffix, nft has several names; setUp runs the program instead.
	iptables, nft string
	// flowtable means that its file has one: TestBesideFlowtables loads it, on a kernel that has them.
	flowtable bool
	setUp     func(w *world)
	// reload writes all of its rules again; nil means that of a file.
	reload func(w *world)
	// own is what the program does itself, and what must keep working.
	own *probe
	// advice is what an operator has to set, a script that is run, or "". Setup is what
	// the program does itself after a while.
	advice, setup string
	// sockets is what mode userspace needs besides, a script, and how the table says it.
	sockets, socketsAbout string
	// remark is for operators too.
	remark string
}

const (
	openHealthChecks = "[health check node ports](ENGINES.md#health-check-node-ports-behind-a-firewall) in INPUT"
	policiesSee      = "[policies](#network-policies), [another masquerade mark](#marks) than its bits"
)

// corpus are all of them.
func corpus() []foreign {
	hostPort, policy := ownHostPort(), ownPolicy()
	viaNFT, againViaNFT := netavark("nftables")
	viaIPTables, againViaIPTables := netavark("iptables")
	return []foreign{
		{
			name: "firewalld", made: "itself, 2.3", setUp: (*world).firewalld, reload: (*world).reloadFirewalld,
			about:  "zone public: rejects in INPUT and FORWARD what it does not know, and accepts translated connections",
			remark: openHealthChecks,
		},
		{
			name: "firewalld, strict", made: "itself, 2.3", setUp: (*world).strictFirewalld, reload: (*world).reloadFirewalld,
			about:  "the same with StrictForwardPorts=yes: rejects translated connections too",
			setup:  "sed -i s/StrictForwardPorts=yes/StrictForwardPorts=no/ /etc/firewalld/firewalld.conf\nfirewall-cmd --complete-reload",
			remark: "`StrictForwardPorts=no` in firewalld.conf",
		},
		{
			name: "ufw", made: "itself, 0.36", setUp: (*world).ufw, reload: (*world).reloadUFW,
			about:  "drops what it does not know, in INPUT and FORWARD",
			advice: "ufw route allow from <pods>\nufw route allow to <pods>",
			sockets: `for file in before:ufw before6:ufw6; do
sed -i "s/^COMMIT/-A ${file#*:}-before-input -m conntrack --ctstate DNAT -j ACCEPT\n&/" /etc/ufw/"${file%:*}".rules
done
ufw reload`,
			socketsAbout: "`-A ufw-before-input -m conntrack --ctstate DNAT -j ACCEPT` in before.rules, the same in before6.rules",
			remark:       openHealthChecks,
		},
		{
			name: "netavark, nftables", made: "itself, 1.14", setUp: viaNFT, reload: againViaNFT, own: &hostPort,
			about: "published ports and masquerading of Podman, in a table of its own; mark 0x2000",
		},
		{
			name: "netavark, iptables", made: "itself, 1.14", setUp: viaIPTables, reload: againViaIPTables, own: &hostPort,
			about: "the same in chains NETAVARK-…",
		},
		{
			name: "portmap, iptables", made: "itself, 1.1", setUp: (*world).portmap, reload: (*world).reloadPortmap, own: &hostPort,
			about: "host ports, in chains CNI-…; mark 0x2000",
		},
		{
			name: "Docker", made: "file, 28.5", iptables: "docker", own: &hostPort,
			about:  "policy DROP of FORWARD; drops packets to a container that do not come through its published port",
			advice: "<iptables> -I DOCKER-USER -s <pods> -j ACCEPT\n<iptables> -I DOCKER-USER -d <pods> -j ACCEPT",
		},
		{
			name: "Calico, iptables", made: "file, 3.30", iptables: "calico", own: &policy,
			about:  "drops what no policy admits; mark bits 0xffff0000",
			setup:  firstInForward(`-m comment --comment "cali:wUHhoiAYhphO9Mso" -j cali-FORWARD`),
			remark: policiesSee,
		},
		{
			name: "Calico, nftables", made: "file, 3.30", nft: "calico", own: &policy, remark: policiesSee,
			about: "the same in tables of its own",
		},
		{name: "Flannel, iptables", made: "file, 0.27", iptables: "flannel", about: "masquerades what leaves the pod network; accepts in FORWARD"},
		{name: "Flannel, nftables", made: "file, 0.27", nft: "flannel", about: "the same in tables of its own"},
		{name: "CRI-O", made: "file, 1.34", iptables: "crio", own: &hostPort, about: "host ports, in chains KUBE-HOSTPORTS and KUBE-HP-…"},
		{name: "portmap, nftables", made: "file, 1.7", nft: "portmap", own: &hostPort, about: "host ports, in tables of its own"},
		{
			name: "kube-router", made: "file, 2.6", iptables: "kube-router", own: &policy,
			about:  "rejects what no network policy admits, in chains KUBE-ROUTER-… and KUBE-POD-FW-…; marks 0x10000 and 0x20000",
			setup:  firstInForward(`-m comment --comment "kube-router netpol - TEMCG2JMHZYE7H7T" -j KUBE-ROUTER-FORWARD`),
			remark: policiesSee,
		},
		{name: "Istio, sidecar", made: "file, 1.27", about: "redirects the TCP connections of a pod to its Envoy", setUp: (*world).sidecar, reload: (*world).reloadSidecar},
		{name: "Istio, ambient", made: "file, 1.27", iptables: "ambient", about: "on the node, a source address of its own for probes of pods of the mesh"},
		{
			name: "Amazon VPC CNI", made: "file, 1.20", iptables: "aws", setUp: (*world).vpc,
			about: "marks the connections of pods that leave the VPC, for the routes of the primary interface; masquerades them; mark 0x80",
		},
		{
			name: "Antrea, flowtable", made: "file, 2.7", nft: "antrea-flowtable", flowtable: true,
			about: "established connections between pods of two nodes pass no rules",
		},
		{
			name: "Calico, flowtable", made: "file, 3.32", nft: "calico calico-flowtable", flowtable: true, own: &policy, remark: policiesSee,
			about: "established connections of pods pass no rules; drops what no policy admits",
		},
		{
			name: "firewalld, flowtable", made: "file, 2.3", nft: "firewalld-flowtable", flowtable: true,
			about: "NftablesFlowtable with all devices: established connections pass no rules; accepts translated connections",
		},
		{name: "Tailscale", made: "file, 1.90", iptables: "tailscale", about: "accepts and masquerades what comes from its device; mark 0x40000/0xff0000", remark: "[another masquerade mark](#marks) than its bits"},
	}
}

// firstInForward moves a jump to the first place of FORWARD, as its program does when it
// checks its rules.
func firstInForward(jump string) string {
	return "<iptables> -D FORWARD " + jump + "\n<iptables> -I FORWARD " + jump
}
