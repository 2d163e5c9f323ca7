package iptables

import (
	"errors"
	"fmt"
	"time"

	"github.com/serviceplane/serviceplane/proxier"
)

// Variant is one of the two implementations of iptables.
type Variant string

// The variants.
const (
	// VariantDetect takes the variant that already holds rules of others, and else
	// that of the program iptables.
	VariantDetect Variant = ""
	VariantNFT    Variant = "nft"
	VariantLegacy Variant = "legacy"
)

// Config configures the iptables engine.
type Config struct {
	proxier.Config
	Variant Variant
	// LocalhostNodePorts accepts node ports on 127.0.0.0/8 too, over IPv4. It sets
	// the kernel's route_localnet, and with it a rule that drops what comes for these
	// addresses from other hosts (CVE-2020-8558).
	LocalhostNodePorts bool
	// KeepInvalid forwards TCP packets that connection tracking finds out of order.
	// They are dropped otherwise, unless the kernel's nf_conntrack_tcp_be_liberal is
	// set: as they are not translated back, they would reset the client's
	// connection.
	KeepInvalid bool
	// Portals is set where this engine leads packets to the sockets of a userspace
	// engine, as userspace.Config.Portals: connections that were led to a socket meet
	// no refusal any more. With kube-proxy's names, packets then come by the chains of
	// its userspace mode, KUBE-PORTALS-CONTAINER and KUBE-PORTALS-HOST.
	Portals bool
	// HealthChecksOnly makes the engine let health check node ports in, whatever other
	// rules at INPUT refuse, and do nothing else: for an engine that has no rules of
	// iptables itself, as ipvs.Config.Firewall. Its chains PREFIX-IPVS-… are nobody
	// else's.
	HealthChecksOnly bool
	// LockWait is how long iptables-legacy waits for its lock, which all programs
	// share; 0 means 30s. Timeout bounds each run of a program, the wait apart; 0
	// means 60s.
	LockWait, Timeout time.Duration
}

const (
	defaultLockWait = 30 * time.Second
	defaultTimeout  = time.Minute
)

// chains are the names of the chains.
func (c *Config) chains() chainNames {
	if c.HealthChecksOnly {
		return chainNames{c.Names.ChainPrefix + "-IPVS"}
	}
	return chainNames{c.Names.ChainPrefix}
}

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	if c.LockWait == 0 {
		c.LockWait = defaultLockWait
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
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
	switch c.Variant {
	case VariantDetect, VariantNFT, VariantLegacy:
	default:
		bad("Variant", "%q: want %q, %q or nothing", c.Variant, VariantNFT, VariantLegacy)
	}
	if c.LockWait < time.Second {
		bad("LockWait", "%v is less than a second", c.LockWait)
	}
	if c.Timeout < 0 {
		bad("Timeout", "%v is negative", c.Timeout)
	}
	return errors.Join(errs...)
}
