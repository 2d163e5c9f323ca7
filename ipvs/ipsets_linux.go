package ipvs

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// errSetInUse means that a rule uses an ipset.
var errSetInUse = errors.New("a rule uses it")

// kubeProxySets are the ipsets of kube-proxy's mode ipvs, without their prefixes KUBE- and
// KUBE-6- (pkg/proxy/ipvs/ipset.go). Names have at most 31 bytes.
func kubeProxySets() []string {
	return []string{
		"LOOP-BACK", "CLUSTER-IP", "EXTERNAL-IP", "EXTERNAL-IP-LOCAL", "LOAD-BALANCER", "LOAD-BALANCER-LOCAL", "LOAD-BALANCER-FW",
		"LOAD-BALANCER-SOURCE-IP", "LOAD-BALANCER-SOURCE-CIDR", "NODE-PORT-TCP", "NODE-PORT-LOCAL-TCP", "NODE-PORT-UDP",
		"NODE-PORT-LOCAL-UDP", "NODE-PORT-SCTP-HASH", "NODE-PORT-LOCAL-SCTP-HASH", "HEALTH-CHECK-NODE-PORT", "IPVS-IPS",
	}
}

const maxSetName = 31 // IPSET_MAXNAMELEN of linux/netfilter/ipset/ip_set.h, less the NUL

func (l *left) setName(name string) string {
	prefix := "KUBE-"
	if l.v6 {
		prefix = "KUBE-6-"
	}
	name = prefix + name
	return name[:min(len(name), maxSetName)]
}

// hasSets reports whether the instance has kube-proxy's names, and the kernel has ipsets.
// Asking for one would load the module.
func (l *left) hasSets() bool {
	_, err := os.Stat("/sys/module/ip_set")
	return err == nil && l.config.Names == proxier.KubeProxyNames()
}

// kubeProxyServers returns a function that reports whether a virtual server on an address
// of the node is kube-proxy's, because its ipsets name it; nil without them.
func (l *left) kubeProxyServers() (func(serverKey) bool, error) {
	if !l.hasSets() {
		return nil, nil
	}
	named := map[desired.Key]bool{}
	for name, protocol := range map[string]desired.Protocol{
		"NODE-PORT-TCP": desired.TCP, "NODE-PORT-UDP": desired.UDP, "NODE-PORT-SCTP-HASH": desired.SCTP,
		"EXTERNAL-IP": 0, "EXTERNAL-IP-LOCAL": 0, "LOAD-BALANCER": 0,
	} {
		set, err := l.handle.IpsetList(l.setName(name))
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list ipset %s: %w", l.setName(name), netlinkx.Denied(err))
		}
		for i := range set.Entries {
			switch entry := &set.Entries[i]; {
			case entry.Port == nil:
			case protocol != 0:
				named[desired.Key{Protocol: protocol, Port: *entry.Port}] = true
			case entry.Protocol != nil:
				named[serverKey{VIP: addrOf(entry.IP), Protocol: protocolOf(*entry.Protocol), Port: *entry.Port}] = true
			}
		}
	}
	return func(key serverKey) bool {
		return named[key] || named[desired.Key{Protocol: key.Protocol, Port: key.Port}]
	}, nil
}

// removeSets deletes kube-proxy's ipsets. The error is errSetInUse while a rule uses one.
func (l *left) removeSets() error {
	if !l.hasSets() {
		return nil
	}
	var errs []error
	for _, name := range kubeProxySets() {
		err := l.handle.IpsetDestroy(l.setName(name))
		switch {
		case err == nil || errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.EBUSY) || errors.Is(err, nl.IPSetError(nl.IPSET_ERR_BUSY)):
			errs = append(errs, fmt.Errorf("delete ipset %s: %w", l.setName(name), errSetInUse))
		default:
			errs = append(errs, fmt.Errorf("delete ipset %s: %w", l.setName(name), netlinkx.Denied(err)))
		}
	}
	return errors.Join(errs...)
}

// protocolOf returns the protocol with a number of IANA, 0 if no service port can have it.
func protocolOf(number uint8) desired.Protocol {
	p := desired.Protocol(number)
	if !slices.Contains([]desired.Protocol{desired.TCP, desired.UDP, desired.SCTP}, p) {
		return 0
	}
	return p
}
