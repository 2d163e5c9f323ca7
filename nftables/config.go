package nftables

import (
	engine "github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the nftables engine.
type Config struct {
	proxier.Config
	// DNATPriority and SNATPriority are the priorities of the nat chains at the hooks
	// prerouting and output, and at postrouting. 0 means -101 and 99: just before the kernel's
	// NF_IP_PRI_NAT_DST (-100) and NF_IP_PRI_NAT_SRC (100), which iptables and most programs use.
	// Of two chains with one priority, the kernel runs the one first that came last.
	DNATPriority, SNATPriority int32
	// AffinityRecords limits the number of clients with session affinity at a time, per
	// family; further clients are balanced without affinity. 0 means 1048576.
	AffinityRecords uint32
	// FastPathAfter is the number of packets, of both directions, after which an established
	// connection of a service port with FastPath skips the rules of the node: see Fast path. 0 turns
	// that off; 20 spares it short connections. It makes the kernel count the packets of
	// connections, as net.netfilter.nf_conntrack_acct does.
	FastPathAfter uint32
	// FastPathDevice chooses the devices whose packets take the fast path, by name. Nil means all but
	// loopback. It may be called at any time.
	FastPathDevice func(name string) bool
	// CloseLoadBalancerIPs rejects packets to a load balancer IP at a port or protocol that no Service has
	// there, as for ClusterIPs, unless this node has the address. Without it they are routed as usual, as
	// with kube-proxy: where routers send the address to the nodes, a packet goes back and forth until its
	// TTL ends. Leave it off if load balancer IPs are addresses of nodes: pods would not reach other ports
	// of other nodes.
	CloseLoadBalancerIPs bool
}

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config { return Config(engine.Config(c).WithDefaults()) }

// Validate reports every field that is wrong. Zero fields count as their defaults. All
// of its errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error { return engine.Config(c).Validate() }
