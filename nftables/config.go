package nftables

import (
	engine "github.com/serviceplane/serviceplane/internal/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// Config configures the nftables engine.
type Config struct {
	proxier.Config
	// DNATPriority and SNATPriority are the priorities of the nat chains at the hooks
	// prerouting and output, and at postrouting. 0 means the kernel's NF_IP_PRI_NAT_DST
	// (-100) and NF_IP_PRI_NAT_SRC (100).
	DNATPriority, SNATPriority int32
	// AffinityRecords limits the number of clients with session affinity at a time, per
	// family; further clients are balanced without affinity. 0 means 1048576.
	AffinityRecords uint32
}

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config { return Config(engine.Config(c).WithDefaults()) }

// Validate reports every field that is wrong. Zero fields count as their defaults. All
// of its errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error { return engine.Config(c).Validate() }
