package iptables

import (
	"fmt"
	"os"
	"strings"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// routeLocalnet lets packets with loopback addresses be routed, in all interfaces of
// a network namespace (Documentation/networking/ip-sysctl.rst).
const routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"

// tcpBeLiberal is of Documentation/networking/nf_conntrack-sysctl.rst.
const tcpBeLiberal = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"

// allowLocalnet sets route_localnet, if node ports are accepted on loopback
// addresses. The rule that keeps other hosts out is in place before. The engine
// remembers whether it was it who set it.
func (e *Engine) allowLocalnet() error {
	if !e.model.localhost() {
		return nil
	}
	return namespace.Visit(e.config.NetNS, func() error {
		now, err := os.ReadFile(routeLocalnet)
		if err != nil {
			return fmt.Errorf("read kernel setting: %w", err)
		}
		if strings.TrimSpace(string(now)) == "1" {
			return nil
		}
		if err := os.WriteFile(routeLocalnet, []byte("1"), 0o600); err != nil {
			return fmt.Errorf("change kernel setting: %w", err)
		}
		e.setLocalnet = true
		return nil
	})
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

// restoreLocalnet undoes allowLocalnet.
func (e *Engine) restoreLocalnet() error {
	if !e.setLocalnet {
		return nil
	}
	err := namespace.Visit(e.config.NetNS, func() error { return os.WriteFile(routeLocalnet, []byte("0"), 0o600) })
	if err != nil {
		return fmt.Errorf("restore kernel setting: %w", err)
	}
	e.setLocalnet = false
	return nil
}
