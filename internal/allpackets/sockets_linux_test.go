package allpackets

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	bpf "github.com/cilium/ebpf"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/oracle"
	nftengine "github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// socketsEngine translates sockets before the rules.
func socketsEngine(t *testing.T, podsKeepSource bool) engine {
	t.Helper()
	name, sockets := "ebpf", ebpf.Sockets{PodsKeepSource: podsKeepSource}
	if podsKeepSource {
		name = "ebpf-podsKeepSource"
	}
	seen := &socketsSeen{}
	t.Cleanup(func() {
		if seen.clusters > 0 && seen.packets < 100 {
			t.Errorf("%s: sockets carried %d packets of %d clusters, want 100 or more", name, seen.packets, seen.clusters)
		}
	})
	return engine{
		name: name,
		make: func(c proxier.Config, d proxier.Deps) (*proxier.Proxier, error) {
			sockets.BPFFS, sockets.Cgroups = bpftest.FileSystem(t), []string{bpftest.NewCgroup(t)} // of a cluster: a cgroup has room for 64 programs
			if c.Masquerade.NodePodCIDRs && !c.Masquerade.All {
				seen.clusters++
			}
			return ebpf.New(ebpf.Config{Config: nftengine.Config{Config: c}, Sockets: sockets}, d)
		},
		read: func(ns *netns.NS, family v1.IPFamily) (ruleset, error) {
			rules, err := readNFTables(ns, family)
			if err != nil {
				return nil, err
			}
			frontends, err := readFrontends(sockets.BPFFS, family)
			return &socketRules{rules, podsKeepSource, frontends, seen}, err
		},
	}
}

// socketsSeen counts what sockets carried, of clusters where they can.
type socketsSeen struct{ clusters, packets int }

// socketRules are what a packet meets whose socket may be translated: the maps of the programs, and
// then the rules.
type socketRules struct {
	ruleset

	podsKeepSource bool
	frontends      map[netip.AddrPort][]netip.AddrPort
	seen           *socketsSeen
}

// endpoints are those of which a socket gets one; none if the rules have the packet. Sockets are those of
// the node and of its pods.
func (r *socketRules) endpoints(protocol desired.Protocol, source netip.Addr, to netip.AddrPort, fromNode bool) []netip.AddrPort {
	ofPod := slices.ContainsFunc([]string{"10.244.1.0/24", "fd00:244:1::/48"}, func(cidr string) bool {
		return netip.MustParsePrefix(cidr).Contains(source)
	})
	if protocol != desired.TCP || !fromNode && !ofPod {
		return nil
	}
	return r.frontends[to]
}

// keepSource changes what the oracle wants for the packet of a translated socket. The node's sockets get
// the same source by routing; the source of a packet that returns to its sender is its own; and with
// podsKeepSource, pods keep theirs.
func (r *socketRules) keepSource(p oracle.Packet, want []oracle.Outcome) []oracle.Outcome {
	if len(r.endpoints(p.Protocol, p.Source.Addr(), p.Destination, p.FromNode)) == 0 {
		return want
	}
	want = slices.Clone(want)
	for i := range want {
		if p.FromNode || want[i].Endpoint.Addr() == p.Source.Addr() || r.podsKeepSource {
			want[i].Masquerade = false
		}
	}
	return want
}

// walk implements ruleset.
func (r *socketRules) walk(p *packet, dice func(sides int) int) error {
	endpoints := r.endpoints(p.protocol, p.source.Addr(), p.dest, p.fromNode)
	if len(endpoints) == 0 {
		return r.ruleset.walk(p, dice)
	}
	r.seen.packets++
	to := endpoints[dice(len(endpoints))]
	after := *p
	after.dest = to
	if err := r.ruleset.walk(&after, dice); err != nil {
		return err
	}
	if after.translated || after.verdict != "" || after.masq {
		return fmt.Errorf("after sockets the rules change a packet to %v: %+v", to, after)
	}
	p.dest, p.translated = to, true
	return nil
}

// readFrontends reads the pinned maps, which have the layout of sockets.c.
func readFrontends(bpffs string, family v1.IPFamily) (all map[netip.AddrPort][]netip.AddrPort, err error) {
	dir, size := "ip4", 4
	if family == v1.IPv6Protocol {
		dir, size = "ip6", 16
	}
	maps := map[string]*bpf.Map{}
	for _, name := range []string{"frontends", "services", "endpoints"} {
		paths, _ := filepath.Glob(filepath.Join(bpffs, "serviceplane/*", dir, "v1/maps", name))
		if len(paths) != 1 { // the pattern is not malformed
			return nil, fmt.Errorf("map %s of %s is pinned at %v, want one path", name, family, paths)
		}
		m, err := bpf.LoadPinnedMap(paths[0], nil)
		if err != nil {
			return nil, err
		}
		defer func() { _ = bpfx.Close(m) }()
		maps[name] = m
	}
	all = map[netip.AddrPort][]netip.AddrPort{}
	var key []byte
	var leads struct{ Service, Scope uint32 }
	for each := maps["frontends"].Iterate(); each.Next(&key, &leads); {
		var picks [2]uint64
		if err := maps["services"].Lookup(leads.Service, &picks); err != nil {
			return nil, err
		}
		first, count := uint32(picks[leads.Scope]>>32), uint32(uint16(picks[leads.Scope]>>16))
		at := addrPort(key, size)
		for i := range count {
			endpoint, err := maps["endpoints"].LookupBytes(first + i)
			if err != nil {
				return nil, err
			}
			all[at] = append(all[at], addrPort(endpoint, size))
		}
	}
	return all, nil
}

func addrPort(bytes []byte, size int) netip.AddrPort {
	a, _ := netip.AddrFromSlice(bytes[:size])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(bytes[size:]))
}
