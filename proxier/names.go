package proxier

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Names are what every kernel object of one instance hangs off. Two instances
// with different Names never touch each other's objects; those that have a table, a chain
// prefix or a device in common do not run at the same time (ErrInUse).
type Names struct {
	// Instance tells instances apart in logs and in the names below.
	Instance string
	// Table is the nf_tables table, one in each family.
	Table string
	// ChainPrefix begins the names of iptables chains, and a hyphen ends it: it has none
	// itself, so that no chain can be of two instances.
	ChainPrefix string
	// Device is the dummy network device that holds VIPs in IPVS mode. One of that name
	// which these Names have not made is left alone, and syncs fail.
	Device string
}

// The kernel's limits, without the terminating NUL: NFT_NAME_MAXLEN (256) of
// linux/netfilter/nf_tables.h, XT_EXTENSION_MAXNAMELEN (29) of
// linux/netfilter/x_tables.h and IFNAMSIZ (16) of linux/if.h. Chains need room for what
// is appended to the prefix.
const (
	maxTable       = 255
	maxChainPrefix = 28 - 17 // "-SVC-" and 12 characters of hash at least
	maxDevice      = 15
	maxInstance    = maxChainPrefix - len(instancePrefix)
)

// instancePrefix begins the chain prefixes of instances. No other program's chains
// begin so.
const instancePrefix = "SPL_"

// DefaultNames are the names of an instance of our own, which shares a node with
// kube-proxy without either touching the other's objects.
func DefaultNames() Names {
	return Names{Instance: "serviceplane", Table: "serviceplane", ChainPrefix: "SPL", Device: "serviceplane0"}
}

// KubeProxyNames are kube-proxy's names, for a program that takes its place:
// other software looks for them, and cleans them up.
func KubeProxyNames() Names {
	return Names{Instance: "kube-proxy", Table: "kube-proxy", ChainPrefix: "KUBE", Device: "kube-ipvs0"}
}

// NamesFor derives the names of an instance: at most 7 characters, lower-case
// letters, digits and inner hyphens, so that every derived name fits the kernel's
// limits. "edge" gives table "serviceplane-edge", chains "SPL_EDGE-…" and device
// "edge-svc0". Whatever the instances are called, none has an object of another, or of
// any other program.
func NamesFor(instance string) (Names, error) {
	if err := checkInstance(instance); err != nil {
		return Names{}, err
	}
	n := Names{
		Instance:    instance,
		Table:       "serviceplane-" + instance,
		ChainPrefix: instancePrefix + strings.ToUpper(strings.ReplaceAll(instance, "-", "_")),
		Device:      instance + "-svc0",
	}
	return n, n.Validate()
}

func checkInstance(instance string) error {
	valid := instance != "" && len(instance) <= maxInstance &&
		strings.Trim(instance, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" &&
		!strings.HasPrefix(instance, "-") && !strings.HasSuffix(instance, "-")
	if valid {
		return nil
	}
	return fmt.Errorf("%w: instance %q: want 1 to %d lower-case letters, digits or inner hyphens",
		ErrInvalidConfig, instance, maxInstance)
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
	return errors.Join(append(errs, n.checkChainPrefix())...)
}

// checkChainPrefix keeps an instance away from the chains of other programs and
// instances.
func (n Names) checkChainPrefix() error {
	first, _, hyphen := strings.Cut(n.ChainPrefix, "-")
	isKubeProxy := n.Instance == KubeProxyNames().Instance && first == KubeProxyNames().ChainPrefix
	switch {
	case hyphen:
		return fmt.Errorf("%w: Names.ChainPrefix: %q has a hyphen, which is to end the prefix: use '_'", ErrInvalidConfig, n.ChainPrefix)
	case slices.Contains(otherOwners(), strings.ToUpper(first)) && !isKubeProxy:
		return fmt.Errorf("%w: Names.ChainPrefix: chains %s-… are those of other programs: choose another one, or take KubeProxyNames as a whole",
			ErrInvalidConfig, n.ChainPrefix)
	}
	return nil
}

// otherOwners are what the chains of well-known programs begin with, up to a hyphen:
// kube-proxy, kubelet, CRI-O and kube-router; CNI plugins; container engines; service
// meshes; firewalls and their companions.
func otherOwners() []string {
	return []string{
		"KUBE", "CRIO", "CNI", "CALI", "CILIUM", "ANTREA", "FLANNEL", "WEAVE", "OVN", "AWS", "AZURE", "GKE", "IP",
		"DOCKER", "NETAVARK", "PODMAN", "LIBVIRT", "LXC", "LXD", "INCUS",
		"ISTIO", "LINKERD", "CONSUL", "TS", "WG", "NM", "UFW", "F2B", "FAIL2BAN", "FIREWALLD", "SSHGUARD", "CSF", "MINIUPNPD",
		"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING",
	}
}

const nameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
