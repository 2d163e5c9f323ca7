package iptables

import "github.com/serviceplane/serviceplane/internal/chainname"

// Counters reads what the rules of an instance count by the kernel's nfacct. It works
// beside the engine, in any process, and starts nothing. Several goroutines may use it.
//
// The objects are kube-proxy's for proxier.KubeProxyNames: localhost_nps_accepted_pkts and
// ct_state_invalid_dropped_pkts. Counts survive restarts, and Cleanup deletes them.
type Counters struct {
	names chainNames
	netNS string
}

// NewCounters returns the counters of the instance of a Config. Without nfnetlink_acct and
// xt_nfacct in the kernel, or with a program iptables that does not know nfacct, there are
// none: the methods return false.
func NewCounters(config Config) *Counters {
	config = config.WithDefaults()
	return &Counters{names: config.chains(), netNS: config.NetNS}
}

// LocalhostNodePorts returns how many connections to node ports at 127.0.0.0/8 were
// accepted. ok is false if the kernel does not count them.
func (c *Counters) LocalhostNodePorts() (packets uint64, ok bool) {
	return c.read(c.names.localhostCounter())
}

// Invalid returns how many packets in conntrack state INVALID were dropped. ok is false if
// the kernel does not count them.
func (c *Counters) Invalid() (packets uint64, ok bool) { return c.read(c.names.invalidCounter()) }

// The names of the nfacct objects; at most 31 characters (NFACCT_NAME_MAX of
// linux/netfilter/nfnetlink_acct.h, less the terminating NUL).
func (n chainNames) localhostCounter() string {
	return n.counter("localhost_nps_accepted_pkts", "localhost_nps")
}

func (n chainNames) invalidCounter() string {
	return n.counter("ct_state_invalid_dropped_pkts", "invalid")
}

// counter returns kube-proxy's name, or one with the prefix of the instance.
func (n chainNames) counter(kubeProxys, others string) string {
	if n.prefix == chainname.KubePrefix {
		return kubeProxys
	}
	return n.prefix + "_" + others
}
