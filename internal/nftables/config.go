package nftables

import (
	"cmp"
	"errors"

	"github.com/serviceplane/serviceplane/internal/invalid"
	"github.com/serviceplane/serviceplane/proxier"
)

// Config is the configuration; the public package documents its fields.
type Config struct {
	proxier.Config
	DNATPriority, SNATPriority int32
	AffinityRecords            uint32
	FastPathAfter              uint32
	FastPathDevice             func(name string) bool
	CloseLoadBalancerIPs       bool
}

const (
	// One before the kernel's NF_IP_PRI_NAT_DST and NF_IP_PRI_NAT_SRC: of two chains with one
	// priority the kernel runs the one first that was registered last, which is a matter of chance.
	defaultDNATPriority    = -101
	defaultSNATPriority    = 99
	defaultAffinityRecords = 1 << 20
	// minNATPriority follows from conntrack: nat chains must run after it
	// (NF_IP_PRI_CONNTRACK of linux/netfilter_ipv4.h).
	minNATPriority = -200
)

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	c.DNATPriority = cmp.Or(c.DNATPriority, defaultDNATPriority)
	c.SNATPriority = cmp.Or(c.SNATPriority, defaultSNATPriority)
	c.AffinityRecords = cmp.Or(c.AffinityRecords, defaultAffinityRecords)
	return c
}

// Validate reports every field that is wrong. Zero fields count as their defaults. All
// of its errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := invalid.Fields{c.Config.Validate()}
	for field, priority := range map[string]int32{"DNATPriority": c.DNATPriority, "SNATPriority": c.SNATPriority} {
		if priority <= minNATPriority {
			errs.Add(field, "%d is not after connection tracking at %d", priority, minNATPriority)
		}
	}
	return errors.Join(errs...)
}
