package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the IPVS engine.
type Config struct {
	proxier.Config
	// Scheduler is the kernel's name of the way to choose a real server, such as "rr",
	// "lc" or "mh"; empty means "rr". The module ip_vs_NAME must be there.
	Scheduler string
	// HashPort makes the schedulers sh and mh look at the source port too, and
	// HashFallback makes them take another real server where the chosen one has weight 0.
	HashPort, HashFallback bool
	// Tune, if set, is asked for what a service port has of its own, for example by an
	// annotation that Tracker.DecorateService has put into Port.Ext. It must be pure.
	Tune func(s *desired.Service) Tuning
	// Forward is how packets get to real servers.
	Forward Forward
	// OnePacket schedules each UDP datagram for itself. The scheduler ops does not
	// exist; this is the flag of ipvsadm --ops.
	OnePacket bool
	// TCPTimeout, TCPFinTimeout and UDPTimeout are how long the kernel remembers quiet
	// connections: open, closed, and of UDP. 0 leaves them as they are.
	TCPTimeout, TCPFinTimeout, UDPTimeout time.Duration
	// Drain is how long connections to a real server may go on that is none any more; 0
	// means 15m. UDP ends at once.
	Drain time.Duration
	// ExcludeCIDRs are virtual servers and addresses to leave alone, whoever made them.
	ExcludeCIDRs []netip.Prefix
	// StrictARP answers ARP requests for the VIPs by the device that has them only, which
	// is none: it sets arp_ignore to 1 and arp_announce to 2.
	StrictARP bool
	// Firewall makes an engine for each IP family that lets health check node ports
	// through the node's own firewall, for example iptables.NewEngine with
	// HealthChecksOnly. It gets the service ports that have one. If it returns
	// proxier.ErrNotSupported, the rest goes on without it. nil makes none.
	Firewall func(family v1.IPFamily) (proxier.Engine, error)
	// SetSysctls sets the kernel settings that the engine needs, in its network
	// namespace: net.ipv4.vs.conntrack, expire_nodest_conn, expire_quiescent_template and
	// ip_forward. Without it a missing one is an error, or a warning.
	SetSysctls bool
}

// Tuning is what a service port has of its own. Zero fields mean the Config's.
type Tuning struct {
	Scheduler string
	// Weight is an endpoint's share of connections, where the scheduler has weights; nil
	// means 1 for all. 0 takes no new ones.
	Weight func(endpoint netip.AddrPort) int
}

// Forward is a forwarding method.
type Forward uint8

const (
	// ForwardMasquerade translates addresses and ports; answers come back this way.
	ForwardMasquerade Forward = iota
	// ForwardDirect hands packets to a real server on the same link as they are, which
	// must have the VIP, and serve at its port. It answers by itself.
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
	if c.Scheduler == "" {
		c.Scheduler = defaultScheduler
	}
	if c.Drain == 0 {
		c.Drain = defaultDrain
	}
	return c
}

// Validate reports every field that is wrong. Zero fields count as their defaults. All
// of its errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := []error{c.Config.Validate()}
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s: %s", proxier.ErrInvalidConfig, field, fmt.Sprintf(format, args...)))
	}
	if len(c.Scheduler) > maxSchedulerName {
		bad("Scheduler", "%q: want %d bytes at most", c.Scheduler, maxSchedulerName)
	}
	if c.Forward > ForwardTunnel {
		bad("Forward", "%d: want ForwardMasquerade, ForwardDirect or ForwardTunnel", c.Forward)
	}
	for _, timeout := range []struct {
		field string
		is    time.Duration
	}{{"TCPTimeout", c.TCPTimeout}, {"TCPFinTimeout", c.TCPFinTimeout}, {"UDPTimeout", c.UDPTimeout}} {
		if timeout.is < 0 || timeout.is%time.Second != 0 {
			bad(timeout.field, "%v: want whole seconds, 0 or more", timeout.is)
		}
	}
	if c.Drain < 0 {
		bad("Drain", "%v: want 0 or more", c.Drain)
	}
	if slices.ContainsFunc(c.ExcludeCIDRs, func(p netip.Prefix) bool { return !p.IsValid() }) {
		bad("ExcludeCIDRs", "%v: want valid prefixes", c.ExcludeCIDRs)
	}
	return errors.Join(errs...)
}
