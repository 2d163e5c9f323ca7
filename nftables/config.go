package nftables

import (
	"errors"
	"fmt"

	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the nftables engine.
type Config struct {
	proxier.Config
	// DNATPriority and SNATPriority are the priorities of the nat chains at the
	// prerouting and output hooks, and at the postrouting hook. 0 means the
	// kernel's own NF_IP_PRI_NAT_DST (-100) and NF_IP_PRI_NAT_SRC (100).
	DNATPriority, SNATPriority int32
	// AffinityRecords bounds how many clients can have session affinity at a time,
	// per family; the ones beyond it are balanced like any other. 0 means 1048576.
	AffinityRecords uint32
	// Verdicts makes the engine decide everything but the endpoint: what is dropped,
	// refused and masqueraded, for another engine, such as ipvs, that takes packets
	// behind it. Nothing is translated. Sources that are a ClusterIP are masqueraded.
	Verdicts bool
}

const (
	defaultDNATPriority    = -100
	defaultSNATPriority    = 100
	defaultAffinityRecords = 1 << 20
	// minNATPriority is what conntrack needs: nat chains must come after it
	// (NF_IP_PRI_CONNTRACK of linux/netfilter_ipv4.h).
	minNATPriority = -200
)

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	if c.DNATPriority == 0 {
		c.DNATPriority = defaultDNATPriority
	}
	if c.SNATPriority == 0 {
		c.SNATPriority = defaultSNATPriority
	}
	if c.AffinityRecords == 0 {
		c.AffinityRecords = defaultAffinityRecords
	}
	return c
}

// Validate reports every field that is wrong. Zero fields count as their defaults. All
// of its errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := []error{c.Config.Validate()}
	for field, priority := range map[string]int32{"DNATPriority": c.DNATPriority, "SNATPriority": c.SNATPriority} {
		if priority <= minNATPriority {
			errs = append(errs, fmt.Errorf("%w: %s: %d is not after connection tracking at %d",
				proxier.ErrInvalidConfig, field, priority, minNATPriority))
		}
	}
	return errors.Join(errs...)
}
