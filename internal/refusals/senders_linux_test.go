package refusals

import (
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

// sender is a host that sends, and the address that it writes as the source.
type sender struct {
	name, host string
	source     [2]string // IPv4 and IPv6
	// honest means that the source is an address of the sender.
	honest bool
	// impossible means that no packet with this source may come from there: nothing gets
	// through.
	impossible bool
}

func (s sender) addr(family v1.IPFamily) netip.Addr {
	return netip.MustParseAddr(s.source[index(family)])
}

// senders are all places where a client stands, and what it may pretend.
func senders(world *proxiertest.Topology) []sender {
	own := func(name, host string, h *proxiertest.Host, nth int) sender {
		return sender{name: name, host: host, source: [2]string{h.Addrs[2*nth].String(), h.Addrs[2*nth+1].String()}, honest: true}
	}
	all := []sender{
		own("outside", "client", world.Client, 0),
		own("outside, second address", "client", world.Client, 1),
		own("another node", "router", world.Router, 0),
		own("pod elsewhere", "router", world.RemotePods[1], 0),
		own("endpoint elsewhere", "router", world.RemotePods[0], 0),
		own("pod", "pod-0", world.LocalPods[0], 0),
		own("endpoint", "pod-1", world.LocalPods[1], 0),
		own("node", "node", world.Node, 0),
		own("node, second address", "node", world.Node, 1),
		{name: "node, loopback", host: "node", source: [2]string{"127.0.0.1", "::1"}},
	}
	for _, host := range []string{"client", "router", "pod-0"} {
		all = append(all,
			sender{name: "loopback from " + host, host: host, source: [2]string{"127.0.0.1", "::1"}, impossible: true},
			sender{name: "other loopback from " + host, host: host, source: [2]string{"127.0.0.5", "::1"}, impossible: true},
			sender{name: "the node's from " + host, host: host, source: [2]string{"192.0.2.10", "2001:db8:2::10"}})
	}
	return append(all,
		sender{name: "a pod's from outside", host: "client", source: [2]string{"10.244.1.2", "fd00:10:244:1::2"}},
		sender{name: "an endpoint's from outside", host: "client", source: [2]string{"10.244.1.18", "fd00:10:244:1:1::2"}},
		sender{name: "a pod's from another node", host: "router", source: [2]string{"10.244.1.2", "fd00:10:244:1::2"}},
		sender{name: "a ClusterIP from a pod", host: "pod-0", source: [2]string{"10.96.250.1", "fd00:10:96::fa01"}},
		sender{name: "unspecified from outside", host: "client", source: [2]string{"0.0.0.0", "::"}},
		sender{name: "multicast from outside", host: "client", source: [2]string{"224.0.0.9", "ff02::9"}, impossible: true},
	)
}
