package proxier

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/runner"
)

const (
	defaultMark           = 1 << 14 // kube-proxy's --masquerade-bit default
	defaultFullSyncPeriod = time.Hour
	defaultNodeTimeout    = 30 * time.Second // kube-proxy 1.37 waits for 32
)

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	if len(c.Families) == 0 {
		c.Families = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
	}
	if c.Names == (Names{}) {
		c.Names = DefaultNames()
	}
	c.Masquerade.Mark = cmp.Or(c.Masquerade.Mark, defaultMark)
	c.FullSyncPeriod = cmp.Or(c.FullSyncPeriod, defaultFullSyncPeriod)
	c.NodeTimeout = cmp.Or(c.NodeTimeout, defaultNodeTimeout)
	c.Runner = c.Runner.WithDefaults()
	return c
}

// Validate reports every invalid field, with its value and the allowed ones. Zero fields
// count as their defaults. All of its errors are ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := []error{c.Names.Validate(), c.validateRunner()}
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s: %s", ErrInvalidConfig, field, fmt.Sprintf(format, args...)))
	}
	for i, f := range c.Families {
		if f != v1.IPv4Protocol && f != v1.IPv6Protocol {
			bad("Families", "%q is neither IPv4 nor IPv6", f)
		}
		if slices.Contains(c.Families[:i], f) {
			bad("Families", "%s is listed twice", f)
		}
	}
	if c.NodeTimeout < 0 && c.NodeTimeout != runner.Never {
		bad("NodeTimeout", "%v is negative", c.NodeTimeout)
	}
	if c.FullSyncPeriod < 0 {
		bad("FullSyncPeriod", "%v is negative", c.FullSyncPeriod)
	}
	if bits.OnesCount32(c.Masquerade.Mark) != 1 {
		bad("Masquerade.Mark", "%#x is not a single bit", c.Masquerade.Mark)
	}
	for i, kind := range c.Kinds {
		if kind < desired.ClusterIP || kind > desired.NodePort {
			bad(fmt.Sprintf("Kinds[%d]", i), "%d is not a kind of frontend", kind)
		}
	}
	errs = append(errs,
		validatePrefixes("NodePorts.Addresses", c.NodePorts.Addresses),
		validatePrefixes("Masquerade.PodCIDRs", c.Masquerade.PodCIDRs),
		c.Masquerade.validatePods())
	return errors.Join(errs...)
}

func (c Config) validateRunner() error {
	if err := c.Runner.Validate(); err != nil {
		return fmt.Errorf("%w: Runner: %w", ErrInvalidConfig, err)
	}
	return nil
}

func validatePrefixes(field string, prefixes []netip.Prefix) error {
	var errs []error
	for i, p := range prefixes {
		if !p.IsValid() {
			errs = append(errs, fmt.Errorf("%w: %s[%d]: not a valid prefix", ErrInvalidConfig, field, i))
		}
	}
	return errors.Join(errs...)
}

const maxInterfaceName = 15 // IFNAMSIZ of linux/if.h, without the terminating NUL

// InterfaceNames says what ValidInterfaceName accepts.
const InterfaceNames = "1 to 15 bytes of printable ASCII, without spaces, quotes, backslashes and any of / : * + ! , ;"

// ValidInterfaceName reports whether a name, or a prefix of names, can be that of an interface, and
// means nothing else in the languages of rules, where some characters quote or stand for others.
func ValidInterfaceName(name string) bool {
	foreign := func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("\"'`\\/:*+!,;", r) }
	return name != "" && len(name) <= maxInterfaceName && !strings.ContainsFunc(name, foreign)
}

// validatePods checks the ways to recognize pod traffic.
func (m *Masquerade) validatePods() error {
	var errs []error
	set := 0
	for _, isSet := range []bool{len(m.PodCIDRs) > 0, m.NodePodCIDRs, m.PodInterface != "", m.PodInterfacePrefix != ""} {
		if isSet {
			set++
		}
	}
	if set > 1 {
		errs = append(errs, fmt.Errorf("%w: Masquerade: %d ways to recognize pod traffic are set, want one at most", ErrInvalidConfig, set))
	}
	for field, name := range map[string]string{"PodInterface": m.PodInterface, "PodInterfacePrefix": m.PodInterfacePrefix} {
		if name != "" && !ValidInterfaceName(name) {
			errs = append(errs, fmt.Errorf("%w: Masquerade.%s: %q: want %s", ErrInvalidConfig, field, name, InterfaceNames))
		}
	}
	return errors.Join(errs...)
}
