package ipvs

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/invalid"
	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the IPVS engine.
type Config struct {
	proxier.Config
	// Scheduler is the name of a scheduler of the kernel, such as "rr", "lc" or "mh"; ""
	// means "rr". It needs the module ip_vs_NAME. It is for service ports with policy
	// changetracker.Random; other policies have their own schedulers.
	Scheduler string
	// HashPort makes the schedulers sh and mh hash the source port too. HashFallback makes
	// them choose another real server if the first one has weight 0.
	HashPort, HashFallback bool
	// Choose returns the settings of one service port; nil means those of the Config. See package proxier.
	Choose func(s *desired.Service) Tuning
	// Forward is how packets are forwarded to real servers. Node ports are always masqueraded, because no
	// real server has the node's address, and so is SCTP.
	Forward ForwardingMethod
	// OnePacket schedules each UDP datagram separately, like the flag --ops of ipvsadm.
	OnePacket bool
	// TCPTimeout, TCPFinTimeout and UDPTimeout are how long the kernel stores idle
	// connections: open TCP, closed TCP, and UDP. 0 leaves the kernel's setting.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Drain is how long connections to a removed real server may continue; 0 means 15m. UDP
	// flows end at once. For Leaving, it is how long all connections may, UDP flows too.
	Drain time.Duration
	// ExcludeCIDRs are addresses that the engine never changes, nor virtual servers there.
	ExcludeCIDRs []netip.Prefix
	// StrictARP stops the node from answering ARP requests for VIPs: it needs arp_ignore 1
	// and arp_announce 2.
	StrictARP bool
	// Firewall returns an engine for each IP family that opens health check node ports in
	// the node's own firewall, for example iptables.NewEngine with HealthChecksOnly. It gets
	// the service ports that have one. If it returns proxier.ErrNotSupported, syncs continue
	// without it. nil means none.
	Firewall func(family v1.IPFamily) (proxier.Engine, error)
	// SetSysctls sets the kernel settings that the engine needs in its network namespace:
	// net.ipv4.vs.conntrack, expire_nodest_conn, expire_quiescent_template and ip_forward.
	// Without it, a wrong setting is an error or a warning.
	SetSysctls bool
}

// Tuning holds the settings of one service port. Zero fields mean those of the Config, and of
// the load balancing policy of the service port.
type Tuning struct {
	// Scheduler replaces the Config's, and the one of the policy, if it is not "".
	Scheduler string
	// HashPort, HashFallback and OnePacket do for the service port what those of the Config do
	// for all.
	HashPort, HashFallback, OnePacket bool
	// Forward replaces the Config's, if it is not ForwardMasquerade.
	Forward ForwardingMethod
}

// ForwardingMethod is a forwarding method.
type ForwardingMethod uint8

const (
	// ForwardMasquerade translates addresses and ports; replies pass this node too.
	ForwardMasquerade ForwardingMethod = iota
	// ForwardDirect forwards packets unchanged to a real server on the same link. It must
	// have the VIP and listen on its port, and it replies to clients directly: not through this node,
	// which has the VIP too and takes packets from it for forged. So clients on this node get no answer.
	// The source is the client's. An endpoint whose port is not the frontend's gets nothing, and the
	// service port fails.
	ForwardDirect
	// ForwardTunnel does the same through an IP in IP tunnel.
	ForwardTunnel
)

const (
	defaultScheduler = "rr"
	defaultDrain     = 15 * time.Minute
	// maxSchedulerName is IP_VS_SCHEDNAME_MAXLEN (16) of linux/ip_vs.h, less the NUL.
	maxSchedulerName = 15
)

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	c.Scheduler = cmp.Or(c.Scheduler, defaultScheduler)
	c.Drain = cmp.Or(c.Drain, defaultDrain)
	return c
}

// Validate reports every invalid field. Zero fields count as their defaults. All of its
// errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := invalid.Fields{c.Config.Validate()}
	if len(c.Scheduler) > maxSchedulerName {
		errs.Add("Scheduler", "%q: want at most %d bytes", c.Scheduler, maxSchedulerName)
	}
	if c.Forward > ForwardTunnel {
		errs.Add("Forward", "%d: want ForwardMasquerade, ForwardDirect or ForwardTunnel", c.Forward)
	}
	for _, timeout := range []struct {
		field string
		is    time.Duration
	}{{"TCPTimeout", c.TCPTimeout}, {"TCPFinTimeout", c.TCPFinTimeout}, {"UDPTimeout", c.UDPTimeout}} {
		if timeout.is < 0 || timeout.is%time.Second != 0 {
			errs.Add(timeout.field, "%v: want whole seconds, 0 or more", timeout.is)
		}
	}
	if c.Drain < 0 {
		errs.Add("Drain", "%v: want 0 or more", c.Drain)
	}
	if slices.ContainsFunc(c.ExcludeCIDRs, func(p netip.Prefix) bool { return !p.IsValid() }) {
		errs.Add("ExcludeCIDRs", "%v: want valid prefixes", c.ExcludeCIDRs)
	}
	return errors.Join(errs...)
}
