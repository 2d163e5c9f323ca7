package nodeproxy

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/serviceplane/serviceplane/userspace"
)

// sockets are the flags of the userspace mode.
type sockets struct {
	portals, ports string
	udpTimeout     time.Duration
	linger         time.Duration
}

func (s *sockets) register(f *pflag.FlagSet) {
	f.StringVar(&s.portals, "userspace-portals", string(modeNFTables), "rules that redirect to the proxy in mode userspace: nftables or iptables; the flags of that mode apply")
	f.StringVar(&s.ports, "proxy-port-range", "", "ports of the node for mode userspace: first-last, first+count or a single one; empty, 0 and 0-0 for any port")
	f.DurationVar(&s.linger, "userspace-linger", 0, "how long connections of mode userspace, and to node ports at localhost, may continue after SIGTERM, while the next proxy starts; 0 ends them at once")
	f.DurationVar(&s.udpTimeout, "udp-timeout", time.Minute, "idle timeout of UDP flows in mode userspace")
}

func (s *sockets) validate(f *faults) {
	f.check(s.portals == string(modeNFTables) || s.portals == string(modeIPTables), "userspace-portals", s.portals, "nftables or iptables")
	_, err := parsePorts(s.ports)
	f.check(err == nil, "proxy-port-range", s.ports, "two ports from 1 to 65535 such as 20000-21000, the lower one first, or 20000+1000, or a single one")
	f.check(s.linger >= 0, "userspace-linger", s.linger, "0 or more")
	f.check(s.udpTimeout > 0, "udp-timeout", s.udpTimeout, "more than 0")
}

// parsePorts parses a range of ports like kube-proxy: "first-last" or "first+count", both
// inclusive, or a single port.
func parsePorts(text string) (userspace.PortRange, error) {
	text = strings.TrimSpace(text)
	if text == "" || text == "0" || text == "0-0" {
		return userspace.PortRange{}, nil
	}
	begin, end, isRange := strings.Cut(text, "-")
	begin, count, isCount := strings.Cut(begin, "+")
	first, err := strconv.ParseUint(begin, 10, 16)
	last := first
	switch {
	case err != nil:
	case isRange && isCount:
		err = strconv.ErrSyntax
	case isRange:
		last, err = strconv.ParseUint(end, 10, 16)
	case isCount:
		last, err = strconv.ParseUint(count, 10, 16)
		last += first
	}
	if err == nil && (first == 0 || last < first || last > 65535) {
		err = strconv.ErrRange
	}
	if err != nil {
		return userspace.PortRange{}, fmt.Errorf("parse ports %q: %w", text, err)
	}
	return userspace.PortRange{First: uint16(first), Last: uint16(last)}, nil
}
