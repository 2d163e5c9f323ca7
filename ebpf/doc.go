// Package ebpf is an engine that translates TCP sockets, and on request UDP sockets, when they
// connect, in the kernel, by BPF programs of cgroups. Their packets leave with the address of an
// endpoint, so that they need no NAT. Below are the complete rules of package nftables: they do
// everything that sockets decline, and everything that comes from other hosts. It is for nodes with
// many short connections, and for those whose programs should see no NAT.
//
//	config := ebpf.Config{Config: nftables.Config{Config: common}}
//	config.Sockets.Cgroups = []string{"/sys/fs/cgroup/kubepods.slice", "/sys/fs/cgroup/system.slice"}
//	p, err := ebpf.New(config, proxier.Deps{})
//
// # What sockets carry
//
// By default, what leads to the same packets as with rules: TCP connections of pods and of the
// node to ClusterIPs, and to load balancer IPs and external IPs under externalTrafficPolicy Local,
// which does not bind them. Sockets.PodsKeepSource adds those under policy Cluster: pods then keep their source.
// Rules have node ports, UDP by default, SCTP, session affinity, consistent hashes, weights, source ranges, all
// that is rejected or dropped, and everything if pods are detected by their interface, or not at all.
// Sockets of the node that are bound to an address are left to the rules, which masquerade them.
// Plan and Explain say for each frontend who does it, and why.
//
// The differences to rules: a pod that is chosen for its own connection keeps its source, so it needs
// no hairpin mode; an address that is not in PodCIDRs, of a container that is no pod, is not
// masqueraded if its cgroup is among Sockets.Cgroups; and bytes and connections that sockets carry are not
// counted (Config.CountConnections, CountTraffic).
//
// # UDP
//
// Rules let open sockets follow the endpoints. Sockets.UDP is for nodes that do not track connections. A
// connected socket then sends to its endpoint as long as that serves. Afterwards Watch ends the socket: the next call of
// the program fails (ECONNABORTED, EDESTADDRREQ), and it must connect again.
//
// # Forwarded packets
//
// With Config.FastPathByBPF, a program at ingress of devices forwards the packets of established flows of
// service ports with changetracker.ServicePort.FastPath. The rules and the kernel's connection
// tracking decide where each flow goes; the program only does to its other packets what the stack
// would, for TCP and UDP, in both directions. The kernel sees how a TCP connection begins and
// ends. Fragments, IP options and extension headers, packets at their last hop or too long for the
// next device, and all that the program is not sure of take the stack: it drops nothing.
//
// These packets skip the rules of all tables at prerouting, forward and postrouting, also those of others, such as a
// NetworkPolicy; IPsec; and the reverse path filter. Connection tracking does not count them, and no
// longer knows the window of TCP. See docs/FASTPATHS.md.
//
// # What it does not gain
//
// On a node whose connections are tracked anyway, connect(2) is not faster than with rules: the work of
// connection tracking stays. What is gained are changes without a system call, and packets
// without NAT.
//
// # Changes
//
// Each service port has one word that names its endpoints. A change writes new endpoints elsewhere and
// then this word, so a socket gets an endpoint from before the change or from after it. What was
// replaced is used again after an RCU grace period. If the maps are full, larger ones are filled
// and the programs move to them.
//
// # Kernel objects
//
// Maps and links are pinned in BPFFS/serviceplane/NAME/ip4 and ip6, where NAME is Names.Table. They do
// their work without the process. The next one finds them there, and writes only what differs. A
// folder is locked by the instance that uses it. Cleanup removes it, which detaches the programs.
// The fast path attaches by tcx, which lets others attach too; before Linux 6.6, by a filter of
// clsact, with the priorities 40000 and 40001.
// Linux 6.1 or newer is needed, with BPF, cgroup v2 and a BPF file system, and the capabilities CAP_BPF and
// CAP_NET_ADMIN. While something is missing, rules do everything, and a Condition says what. Watch finds
// a file system or a cgroup that comes later within ten seconds.
package ebpf
