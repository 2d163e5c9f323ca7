package proxier

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Names determine the names of all kernel objects of one instance. Instances with different
// Names never touch each other's objects. Instances with the same table, chain prefix or
// device cannot run at the same time (ErrInUse).
type Names struct {
	// Instance distinguishes instances in logs and in the names below.
	Instance string
	// Table is the nf_tables table, one in each family.
	Table string
	// ChainPrefix is the prefix of iptables chains. A hyphen follows it; it contains none
	// itself, so that a chain cannot belong to two instances.
	ChainPrefix string
	// Device is the dummy network device that holds VIPs in IPVS mode. If another program
	// has created a device of that name, it is not changed, and syncs fail.
	Device string
}

// The kernel's limits, without the terminating NUL: NFT_NAME_MAXLEN (256) of
// linux/netfilter/nf_tables.h, XT_EXTENSION_MAXNAMELEN (29) of
// linux/netfilter/x_tables.h and IFNAMSIZ (16) of linux/if.h. Chain names need room for the
// part that follows the prefix.
const (
	maxTable       = 255 - 16 // ".ipvs-leaving" and others of its kind
	maxChainPrefix = 28 - 17  // "-SVC-" and 12 characters of hash at least
	maxDevice      = 15
	maxInstance    = maxChainPrefix - len(instancePrefix)
)

// instancePrefix begins the chain prefixes that NamesFor derives. No known program uses it.
const instancePrefix = "SPL_"

// DefaultNames are the names of an instance that runs beside kube-proxy: neither touches
// the other's objects.
func DefaultNames() Names {
	return Names{Instance: "serviceplane", Table: "serviceplane", ChainPrefix: "SPL", Device: "serviceplane0"}
}

// KubeProxyNames are kube-proxy's names, for a program that replaces it: other software
// searches for these names, and cleans them up.
func KubeProxyNames() Names {
	return Names{Instance: "kube-proxy", Table: "kube-proxy", ChainPrefix: "KUBE", Device: "kube-ipvs0"}
}

// NamesFor derives the names of an instance: at most 7 characters, lower-case
// letters, digits and inner hyphens, so that every derived name fits the kernel's
// limits. "edge" gives table "serviceplane-edge", chains "SPL_EDGE-…" and device
// "edge-svc0". Different instances never share an object, neither with each other nor with
// other programs.
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

// Validate checks every name against the kernel's limits and reports all invalid ones.
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
			errs = append(errs, fmt.Errorf("%w: %s: %q has characters other than letters, digits, '-', '_' and '.'",
				ErrInvalidConfig, f.field, f.value))
		}
	}
	return errors.Join(append(errs, n.checkChainPrefix())...)
}

// checkChainPrefix rejects prefixes of chains that belong to other programs or instances.
func (n Names) checkChainPrefix() error {
	first, _, hyphen := strings.Cut(n.ChainPrefix, "-")
	isKubeProxy := n.Instance == KubeProxyNames().Instance && first == KubeProxyNames().ChainPrefix
	switch {
	case hyphen:
		return fmt.Errorf("%w: Names.ChainPrefix: %q contains a hyphen, which ends the prefix: use '_' instead", ErrInvalidConfig, n.ChainPrefix)
	case slices.Contains(foreignPrefixes, strings.ToUpper(first)) && !isKubeProxy:
		return fmt.Errorf("%w: Names.ChainPrefix: chains %s-… belong to another program: choose another prefix, or use KubeProxyNames unchanged",
			ErrInvalidConfig, n.ChainPrefix)
	}
	return nil
}

// foreignPrefixes are the chain prefixes of well-known programs, up to a hyphen: kube-proxy,
// kubelet, CRI-O and kube-router; CNI plugins; container engines; service meshes; firewalls.
var foreignPrefixes = []string{ // read-only
	"KUBE", "CRIO", "CNI", "CALI", "CILIUM", "ANTREA", "FLANNEL", "WEAVE", "OVN", "AWS", "AZURE", "GKE", "IP",
	"DOCKER", "NETAVARK", "PODMAN", "LIBVIRT", "LXC", "LXD", "INCUS",
	"ISTIO", "LINKERD", "CONSUL", "TS", "WG", "NM", "UFW", "F2B", "FAIL2BAN", "FIREWALLD", "SSHGUARD", "CSF", "MINIUPNPD",
	"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING",
}

const nameChars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."
