package iptables

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// routeLocalnet lets packets with loopback addresses be routed, in all interfaces of
// a network namespace; an interface can have it for itself
// (Documentation/networking/ip-sysctl.rst).
const routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"

// tcpBeLiberal is of Documentation/networking/nf_conntrack-sysctl.rst.
const tcpBeLiberal = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"

// localnetRecord is in the chain of the rule that keeps other hosts out, and does
// nothing: it says that route_localnet was 0 before we set it. So any process that cleans
// up knows, for as long as the setting lasts.
func localnetRecord() rule { return `-m comment --comment "route_localnet was 0 before"` }

// guardLocalnet returns the rules that keep other hosts from loopback addresses
// (CVE-2020-8558), nil for none. It is called before the filter table is written, with
// what the chain holds, and whether node ports are accepted there. The setting never
// outlives the rule: when it is not used any more it is set back first, and while it
// stays because we did not set it, the rule stays too.
func (e *Engine) guardLocalnet(have []rule, isUsed bool) (rules []rule, err error) {
	if have == nil && !isUsed {
		return nil, nil
	}
	if !isUsed {
		if err := e.resetLocalnet(have); err != nil {
			return nil, err
		}
	}
	all, some, err := e.localnet()
	switch {
	case err != nil:
		return nil, err
	case isUsed && (e.ownsLocalnet(have) || !all):
		return append(localnetRules(), localnetRecord()), nil
	case isUsed || some:
		return localnetRules(), nil
	}
	return nil, nil
}

func (e *Engine) ownsLocalnet(have []rule) bool {
	return e.setLocalnet || slices.Contains(have, localnetRecord())
}

// resetLocalnet undoes allowLocalnet.
func (e *Engine) resetLocalnet(have []rule) error {
	if !e.ownsLocalnet(have) {
		return nil
	}
	err := namespace.Visit(e.config.NetNS, func() error { return os.WriteFile(routeLocalnet, []byte("0"), 0o600) })
	if err != nil {
		return fmt.Errorf("restore kernel setting: %w", err)
	}
	e.log.Info("kernel setting restored", zap.String("setting", routeLocalnet), zap.String("to", "0"))
	e.setLocalnet = false
	return nil
}

// localnet says whether route_localnet is set for all interfaces, and whether it is for any.
func (e *Engine) localnet() (all, some bool, err error) {
	err = namespace.Visit(e.config.NetNS, func() error {
		files, err := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(routeLocalnet)), "*", filepath.Base(routeLocalnet)))
		if err != nil {
			return err
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if errors.Is(err, os.ErrNotExist) || filepath.Base(filepath.Dir(file)) == "default" {
				continue // an interface that is gone, or that is yet to come
			}
			if err != nil {
				return fmt.Errorf("read kernel setting: %w", err)
			}
			isSet := strings.TrimSpace(string(text)) == "1"
			some, all = some || isSet, all || isSet && file == routeLocalnet
		}
		return nil
	})
	return all, some, err
}

// allowLocalnet sets route_localnet, if node ports are accepted on loopback
// addresses. The rule that keeps other hosts out is in place before, with the record; if
// the record is not there yet, Watch asks for a full write.
func (e *Engine) allowLocalnet() error {
	if !e.model.localhost() {
		return nil
	}
	all, _, err := e.localnet()
	if err != nil || all {
		return err
	}
	if !slices.Contains(e.have[tableFilter][e.model.names.localnet()], localnetRecord()) {
		e.guard.isIntact = false
		return nil
	}
	err = namespace.Visit(e.config.NetNS, func() error { return os.WriteFile(routeLocalnet, []byte("1"), 0o600) })
	if err != nil {
		return fmt.Errorf("change kernel setting: %w", err)
	}
	e.log.Info("kernel setting changed", zap.String("setting", routeLocalnet), zap.String("to", "1"))
	e.setLocalnet = true
	return nil
}

// beLiberal says that connection tracking finds no TCP packet out of order. It is
// asked at each full sync, because an administrator may change it.
func (e *Engine) beLiberal() (liberal bool) {
	_ = namespace.Visit(e.config.NetNS, func() error { // without an answer it is not
		text, err := os.ReadFile(tcpBeLiberal)
		liberal = strings.TrimSpace(string(text)) == "1"
		return err
	})
	return liberal
}
