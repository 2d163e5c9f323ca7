package iptables

import (
	"cmp"
	"errors"
	"time"

	"github.com/serviceplane/serviceplane/internal/invalid"
	"github.com/serviceplane/serviceplane/proxier"
)

// Variant is one of the two implementations of iptables.
type Variant string

// The variants.
const (
	// VariantDetect selects the variant that other programs already use, or else that of
	// the program iptables.
	VariantDetect Variant = ""
	VariantNFT    Variant = "nft"
	VariantLegacy Variant = "legacy"
)

// Config configures the iptables engine.
type Config struct {
	proxier.Config
	Variant Variant
	// RouteLocalnet accepts node ports at 127.0.0.0/8 by rules, IPv4 only, where NodePorts accepts them; without
	// NodePorts it does, as with kube-proxy. It sets the kernel's route_localnet, and adds a rule that drops packets
	// from other hosts to these addresses (CVE-2020-8558).
	RouteLocalnet bool
	// KeepInvalid forwards packets in conntrack state INVALID, for example TCP packets out
	// of the window. By default they are dropped, unless the kernel's
	// nf_conntrack_tcp_be_liberal is set: conntrack does not translate them back, so they
	// would reset the client's connection.
	KeepInvalid bool
	// Portals must be set if this engine redirects packets to the sockets of a userspace
	// engine, as in userspace.Config.Portals: then no rule refuses redirected connections.
	// With kube-proxy's names, packets then pass the chains of its userspace mode,
	// KUBE-PORTALS-CONTAINER and KUBE-PORTALS-HOST.
	Portals bool
	// HealthChecksOnly makes the engine accept packets to health check node ports before
	// other rules of INPUT, and do nothing else: for an engine without iptables rules, see
	// ipvs.Config.Firewall. Its chains are named PREFIX-IPVS-….
	HealthChecksOnly bool
	// LockWait is how long iptables-legacy waits for the xtables lock; 0 means 30s.
	// Timeout bounds each run of a program, without that wait; 0 means 60s.
	LockWait, Timeout time.Duration
}

const (
	defaultLockWait = 30 * time.Second
	defaultTimeout  = time.Minute
)

// chains returns the names of the chains.
func (c *Config) chains() chainNames {
	if c.HealthChecksOnly {
		return chainNames{c.Names.ChainPrefix + "-IPVS"}
	}
	return chainNames{c.Names.ChainPrefix}
}

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	c.LockWait = cmp.Or(c.LockWait, defaultLockWait)
	c.Timeout = cmp.Or(c.Timeout, defaultTimeout)
	return c
}

// Validate reports every invalid field. Zero fields count as their defaults. All of its
// errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := invalid.Fields{c.Config.Validate()}
	switch c.Variant {
	case VariantDetect, VariantNFT, VariantLegacy:
	default:
		errs.Add("Variant", "%q: want %q, %q or none", c.Variant, VariantNFT, VariantLegacy)
	}
	if c.LockWait < time.Second {
		errs.Add("LockWait", "%v is less than a second", c.LockWait)
	}
	if c.Timeout < 0 {
		errs.Add("Timeout", "%v is negative", c.Timeout)
	}
	return errors.Join(errs...)
}
