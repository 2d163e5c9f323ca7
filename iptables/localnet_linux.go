package iptables

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// routeLocalnet makes all interfaces of a network namespace route packets with loopback
// addresses (Documentation/networking/ip-sysctl.rst). Each interface also has a setting of its own,
// which is for whoever sets it, such as CNI plugin portmap, to guard: it was so before this instance.
const routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"

// localnetRecord is a rule without effect, next to the rule that keeps other hosts out.
// It records that route_localnet was 0 before this instance set it, so that any later
// process can restore it.
const localnetRecord rule = `-m comment --comment "route_localnet was 0 before"`

// localnet controls route_localnet. The setting never outlives the rule that keeps other
// hosts from loopback addresses (CVE-2020-8558): it is restored before the rule is
// deleted, and if another program set it, as kube-proxy does, the rule stays.
type localnet struct {
	netNS string
	log   *zap.Logger
	// isOurs means that this process has set it, or has read the record: another program may
	// delete that.
	isOurs bool
}

// rules returns the rules that keep other hosts from loopback addresses, nil for none.
// It is called before the filter table is written, with the rules that the chain holds;
// isUsed means that node ports are accepted on loopback addresses.
func (l *localnet) rules(have []rule, isUsed bool) ([]rule, error) {
	l.note(have)
	if have == nil && !isUsed {
		return nil, nil
	}
	if !isUsed {
		if err := l.restore(); err != nil {
			return nil, err
		}
	}
	all, err := l.read()
	switch {
	case err != nil:
		return nil, err
	case isUsed && (l.isOurs || !all):
		return append(localnetRules(), localnetRecord), nil
	case isUsed || all:
		return localnetRules(), nil
	}
	return nil, nil
}

// note looks for the record among the rules that the chain holds.
func (l *localnet) note(have []rule) { l.isOurs = l.isOurs || slices.Contains(have, localnetRecord) }

// restore sets it back to 0 if this instance has set it.
func (l *localnet) restore() error {
	if !l.isOurs {
		return nil
	}
	all, err := l.read()
	if err == nil && all {
		err = l.write("0", "kernel setting restored")
	}
	if err != nil {
		return fmt.Errorf("restore kernel setting: %w", err)
	}
	l.isOurs = false
	return nil
}

// read reports whether it is set.
func (l *localnet) read() (bool, error) { return isSet(l.netNS, routeLocalnet) }

// write sets it, and logs a message.
func (l *localnet) write(value, message string) error {
	err := namespace.Visit(l.netNS, func() error { return os.WriteFile(routeLocalnet, []byte(value), 0o600) })
	if err == nil {
		l.log.Info(message, zap.String("setting", routeLocalnet), zap.String("to", value))
	}
	return err
}

// tcpBeLiberal makes connection tracking accept TCP packets that are out of the window
// (Documentation/networking/nf_conntrack-sysctl.rst).
const tcpBeLiberal = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"

// isSet reports whether a kernel setting of a network namespace is 1.
func isSet(netNS, setting string) (isSet bool, err error) {
	err = namespace.Visit(netNS, func() error {
		text, err := os.ReadFile(setting)
		if err != nil {
			return fmt.Errorf("read kernel setting: %w", err)
		}
		isSet = strings.TrimSpace(string(text)) == "1"
		return nil
	})
	return isSet, err
}
