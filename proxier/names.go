package proxier

import (
	"errors"
	"fmt"
	"strings"
)

// Names are what every kernel object of one instance hangs off. Two instances
// with different Names never touch each other's objects.
type Names struct {
	// Instance tells instances apart in logs and in the names below.
	Instance string
	// Table is the nf_tables table, one in each family.
	Table string
	// ChainPrefix begins the names of iptables chains.
	ChainPrefix string
	// SetPrefix begins the names of ipsets.
	SetPrefix string
	// Device is the dummy network device that holds VIPs in IPVS mode.
	Device string
}

// The kernel's limits, without the terminating NUL: NFT_NAME_MAXLEN (256) of
// linux/netfilter/nf_tables.h, XT_EXTENSION_MAXNAMELEN (29) of
// linux/netfilter/x_tables.h, IPSET_MAXNAMELEN (32) of linux/netfilter/ipset/
// ip_set.h and IFNAMSIZ (16) of linux/if.h. Chains and sets need room for what
// is appended to the prefix.
const (
	maxTable       = 255
	maxChainPrefix = 28 - 20 // "-SVC-" and 15 characters of hash at most
	maxSetPrefix   = 31 - 24 // "-LOAD-BALANCER-SOURCE-IP" is the longest suffix
	maxDevice      = 15
)

// DefaultNames are the names of an instance of our own, which shares a node with
// kube-proxy without either touching the other's objects.
func DefaultNames() Names {
	return Names{Instance: "serviceplane", Table: "serviceplane", ChainPrefix: "SPL", SetPrefix: "SPL", Device: "serviceplane0"}
}

// KubeProxyNames are kube-proxy's names, for a program that takes its place:
// other software looks for them, and cleans them up.
func KubeProxyNames() Names {
	return Names{Instance: "kube-proxy", Table: "kube-proxy", ChainPrefix: "KUBE", SetPrefix: "KUBE", Device: "kube-ipvs0"}
}

// NamesFor derives the names of an instance: at most 7 characters, lower-case
// letters, digits and inner hyphens, so that every derived name fits the kernel's
// limits. "edge" gives table "serviceplane-edge" and device "edge-svc0".
func NamesFor(instance string) (Names, error) {
	if err := checkInstance(instance); err != nil {
		return Names{}, err
	}
	prefix := strings.ToUpper(instance)
	n := Names{
		Instance:    instance,
		Table:       "serviceplane-" + instance,
		ChainPrefix: prefix,
		SetPrefix:   prefix,
		Device:      instance + "-svc0",
	}
	return n, n.Validate()
}

func checkInstance(instance string) error {
	valid := instance != "" && len(instance) <= maxSetPrefix &&
		strings.Trim(instance, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" &&
		!strings.HasPrefix(instance, "-") && !strings.HasSuffix(instance, "-")
	if valid {
		return nil
	}
	return fmt.Errorf("%w: instance %q: want 1 to %d lower-case letters, digits or inner hyphens",
		ErrInvalidConfig, instance, maxSetPrefix)
}

// Validate checks every name against the kernel's limits and reports all that
// are wrong.
func (n Names) Validate() error {
	var errs []error
	for _, f := range []struct {
		field, value string
		limit        int
	}{
		{"Names.Table", n.Table, maxTable},
		{"Names.ChainPrefix", n.ChainPrefix, maxChainPrefix},
		{"Names.SetPrefix", n.SetPrefix, maxSetPrefix},
		{"Names.Device", n.Device, maxDevice},
	} {
		switch {
		case f.value == "":
			errs = append(errs, fmt.Errorf("%w: %s is empty", ErrInvalidConfig, f.field))
		case len(f.value) > f.limit:
			errs = append(errs, fmt.Errorf("%w: %s: %q is longer than %d bytes", ErrInvalidConfig, f.field, f.value, f.limit))
		case strings.Trim(f.value, nameChars) != "":
			errs = append(errs, fmt.Errorf("%w: %s: %q holds other characters than letters, digits, '-', '_' and '.'",
				ErrInvalidConfig, f.field, f.value))
		}
	}
	return errors.Join(errs...)
}

const nameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
