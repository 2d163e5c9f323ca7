package iptables

import (
	"os"
	"strings"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// tcpBeLiberal is described in Documentation/networking/nf_conntrack-sysctl.rst.
const tcpBeLiberal = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"

// isTCPLiberal reports whether connection tracking accepts TCP packets that are out of
// the window. It is false if the setting cannot be read.
func isTCPLiberal(netNS string) (liberal bool) {
	_ = namespace.Visit(netNS, func() error {
		text, err := os.ReadFile(tcpBeLiberal)
		liberal = strings.TrimSpace(string(text)) == "1"
		return err
	})
	return liberal
}
