package ebpf

import (
	"cmp"
	"errors"
	"path/filepath"
	"slices"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/invalid"
	"github.com/serviceplane/serviceplane/nftables"
)

// Config configures the engine. The embedded Config is that of the rules, which are complete.
type Config struct {
	nftables.Config
	// Sockets configures what is done before the rules.
	Sockets Sockets
	// FastPathByBPF turns on the fast path of packets that the node forwards, of service ports with
	// changetracker.ServicePort.FastPath, by a program at ingress of devices instead of a flowtable, so that
	// FastPathAfter must be 0. It translates and redirects packets of established TCP and UDP flows that the rules have
	// translated: see the package's documentation for what they skip. A packet is forwarded if FastPathDevice chooses
	// both the device that it comes from and the one that it goes to. Only Ethernet devices that belong to no bridge,
	// bond or VRF take part.
	//
	// TCP takes it only where net.netfilter.nf_conntrack_tcp_be_liberal is 1: then a connection can return to
	// the rules at any time, for its end, an IP option or a device without the program. A full sync
	// looks at the settings.
	FastPathByBPF bool
	// FastPathPeer chooses the devices, among those, whose packets are given to the other end of the veth at
	// once, if that is in another network namespace, as it is for pods. That is most of what the
	// fast path gains, and skips also what the node has at egress of the device: queueing
	// disciplines, such as limits of bandwidth, and TC programs. nil chooses none. It may be called at any time.
	FastPathPeer func(name string) bool
}

// Sockets configures the translation of sockets.
type Sockets struct {
	// Cgroups are directories of cgroup v2, such as /sys/fs/cgroup/kubepods.slice, or patterns of
	// filepath.Match for them. Sockets are translated if they were opened by a process there or
	// below. At least one must exist. Others may come and go: Watch finds them within ten seconds,
	// and a Condition names what matches none.
	// The root of the machine's hierarchy also has the kernel's own sockets, such as those of
	// NFS, and programs that other instances translate: name what belongs to the node.
	Cgroups []string
	// BPFFS is the folder of a BPF file system, where maps and links are pinned; "" means
	// /sys/fs/bpf.
	BPFFS string
	// PodsKeepSource also translates connections of pods and of the node to load balancer IPs and external IPs
	// under externalTrafficPolicy Cluster: pods keep their source, which rules masquerade. Without it, sockets
	// translate what leads to the same packets as with the rules.
	PodsKeepSource bool
	// Choose chooses the service ports whose sockets are translated; nil chooses all. See package proxier.
	Choose func(s *desired.Service) bool
	// Namespaces leaves network namespaces to the rules, such as those of pods with a service
	// mesh. nil leaves none.
	Namespaces *Namespaces
	// RealPeer lets getpeername(2) return the endpoint, instead of the VIP that the program has
	// connected to. A connect(2) is faster without the memory of the VIP.
	RealPeer bool
	// UDP also translates UDP sockets. It is for nodes that do not track connections. Without it, rules let open
	// sockets follow the endpoints. It needs Linux 6.5 or newer, which allows BPF iterators over sockets (a hardened
	// kernel may not), CAP_SYS_ADMIN, and Watch.
	//
	// A connected socket keeps its endpoint while that serves. Then the socket ends: its program gets an error, and must
	// connect again. A socket that is not connected keeps its endpoint while new sockets may get it; afterwards its next
	// datagram goes to another one. A socket can have two such VIPs, with different endpoints; the rules have its
	// others. What comes from an endpoint of the socket seems to come from the VIP. Sockets that are connected when the
	// programs are detached end too.
	UDP bool
	// NetNSs returns paths of the network namespaces where sockets may have to end, for UDP.
	// nil means the node's, all in /run/netns, and the namespace of each process that this one sees.
	NetNSs func() ([]string, error)

	leastByWeights bool // Config.LeastConnections
}

const defaultBPFFS = "/sys/fs/bpf"

// WithDefaults returns c with every zero field set to its default.
func (c Config) WithDefaults() Config {
	c.Config = c.Config.WithDefaults()
	c.Sockets.BPFFS = cmp.Or(c.Sockets.BPFFS, defaultBPFFS)
	c.Sockets.leastByWeights = c.LeastConnections
	return c
}

// Validate reports every field that is wrong. Zero fields count as their defaults. All of its
// errors are proxier.ErrInvalidConfig.
func (c Config) Validate() error {
	c = c.WithDefaults()
	errs := invalid.Fields{c.Config.Validate()}
	if c.FastPathPeer != nil && !c.FastPathByBPF {
		errs.Add("FastPathPeer", "set without FastPathByBPF")
	}
	if c.FastPathByBPF && c.FastPathAfter > 0 {
		errs.Add("FastPathByBPF", "FastPathAfter is set too: choose one fast path")
	}
	if len(c.Sockets.Cgroups) == 0 {
		errs.Add("Sockets.Cgroups", "empty: want at least one directory of cgroup v2")
	}
	for i, dir := range c.Sockets.Cgroups {
		if _, err := filepath.Match(dir, ""); err != nil || !filepath.IsAbs(dir) || slices.Contains(c.Sockets.Cgroups[:i], dir) {
			errs.Add("Sockets.Cgroups", "%q: want absolute paths or patterns, each once", dir)
		}
	}
	if !filepath.IsAbs(c.Sockets.BPFFS) {
		errs.Add("Sockets.BPFFS", "%q: want an absolute path", c.Sockets.BPFFS)
	}
	return errors.Join(errs...)
}
