package nodeproxy

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// ebpfAnnotation leaves a Service to the rules in mode ebpf, if it is "false".
const ebpfAnnotation = "serviceplane.io/ebpf"

// socketFlags are the flags of mode ebpf. Its rules have those of mode nftables.
type socketFlags struct {
	mode, udp, bpffs       string
	cgroups                []string
	realPeer               bool
	onlyIn, skipIn         string // folders
	forwardDevices, toPeer []string
	namespaces             namespaceFolder
}

// The values of --ebpf-mode and --ebpf-udp.
const (
	socketsStrict = "strict"
	socketsFast   = "fast"
	udpByRules    = "rules"
	udpBySockets  = "translate"
)

func (s *socketFlags) register(f *pflag.FlagSet) {
	f.StringVar(&s.mode, "ebpf-mode", socketsStrict, "what sockets translate in mode ebpf: strict (what leads to the same packets as rules do) or fast (also load balancer IPs and external IPs of policy Cluster, where pods keep their source); the rules have the flags of mode nftables")
	f.StringVar(&s.udp, "ebpf-udp", udpByRules, "who translates UDP in mode ebpf: rules, or sockets (translate), which is for nodes that do not track connections: connected sockets then end with their endpoint; it needs Linux 6.5, and to see all processes (hostPID)")
	f.StringSliceVar(&s.cgroups, "ebpf-cgroups", nil, "directories of cgroup v2 whose sockets are translated in mode ebpf; patterns are possible; default is kubepods* and system.slice in /sys/fs/cgroup")
	f.StringVar(&s.bpffs, "ebpf-bpffs", "/sys/fs/bpf", "BPF file system where mode ebpf pins its maps and links; other modes remove them there")
	f.StringVar(&s.onlyIn, "ebpf-only-namespaces", "", "folder with network namespaces, such as /run/netns; in mode ebpf, sockets are translated there and in the node's own alone; default is all")
	f.StringVar(&s.skipIn, "ebpf-skip-namespaces", "", "folder with network namespaces, such as those of pods with a service mesh, whose sockets are left to the rules in mode ebpf")
	f.BoolVar(&s.realPeer, "ebpf-real-peer", false, "let getpeername(2) return the endpoint in mode ebpf, instead of the Service's address")
	f.StringSliceVar(&s.forwardDevices, "ebpf-forward-devices", nil, "patterns of the names of network devices, such as eth* and veth*, between which mode ebpf forwards packets of established connections past the rules, of the Services that --nftables-fast-path chooses; default is none")
	f.StringSliceVar(&s.toPeer, "ebpf-forward-peers", nil, "patterns of the names of those of --ebpf-forward-devices whose packets go to the pod's end of the device at once, past queueing disciplines and TC programs; default is none")
}

func (s *socketFlags) validate(f *faults) {
	f.check(s.mode == socketsStrict || s.mode == socketsFast, "ebpf-mode", s.mode, "strict or fast")
	f.check(s.udp == udpByRules || s.udp == udpBySockets, "ebpf-udp", s.udp, "rules or translate")
	f.check(!slices.ContainsFunc(s.cgroups, func(dir string) bool { return !filepath.IsAbs(dir) }), "ebpf-cgroups", s.cgroups, "absolute paths")
	f.check(filepath.IsAbs(s.bpffs), "ebpf-bpffs", s.bpffs, "an absolute path")
	f.check(s.onlyIn == "" || filepath.IsAbs(s.onlyIn), "ebpf-only-namespaces", s.onlyIn, "an absolute path, or nothing")
	f.check(s.skipIn == "" || filepath.IsAbs(s.skipIn) && s.onlyIn == "", "ebpf-skip-namespaces", s.skipIn, "an absolute path, or nothing; nothing beside --ebpf-only-namespaces")
	f.checkPatterns("ebpf-forward-devices", s.forwardDevices)
	f.checkPatterns("ebpf-forward-peers", s.toPeer)
	f.check(len(s.toPeer) == 0 || len(s.forwardDevices) > 0, "ebpf-forward-peers", s.toPeer, "nothing without --ebpf-forward-devices")
}

// config is the engine's configuration, with that of its rules.
func (s *socketFlags) config(rules nftables.Config) ebpf.Config {
	c := ebpf.Config{Config: rules, Sockets: ebpf.Sockets{
		Cgroups: s.chosenCgroups("/sys/fs/cgroup"), BPFFS: s.bpffs, PodsKeepSource: s.mode == socketsFast, UDP: s.udp == udpBySockets, Choose: bySockets, RealPeer: s.realPeer,
		Namespaces: s.namespaces.list,
	}}
	if len(s.forwardDevices) > 0 {
		c.FastPathAfter = 0 // one fast path is enough
		c.FastPathByBPF, c.FastPathDevice, c.FastPathPeer = true, matching(s.forwardDevices), matching(s.toPeer)
	}
	return c
}

// chosenCgroups are those of pods, as systemd or the kubelet names them, and of the node's daemons. The
// kubelet may make its own after the start; systemd has been there before.
func (s *socketFlags) chosenCgroups(root string) []string {
	if len(s.cgroups) > 0 {
		return s.cgroups
	}
	chosen := []string{filepath.Join(root, "kubepods*")}
	daemons := filepath.Join(root, "system.slice")
	if info, err := os.Stat(daemons); err == nil && info.IsDir() {
		chosen = append(chosen, daemons)
	}
	return chosen
}

// payload is what decorate hooks store in a service port.
type payload struct {
	health      healthText
	leftToRules bool
}

func bySockets(s *desired.Service) bool {
	if s.Port == nil {
		return true
	}
	p, _ := changetracker.Ext[payload](s.Port.Ext)
	return !p.leftToRules
}

// decorateSockets is a changetracker.Options.DecorateService.
func decorateSockets(a *annotations, port *changetracker.ServicePort, s *v1.Service) {
	if bySocket, ok := a.truth(s, ebpfAnnotation); ok {
		p, _ := changetracker.Ext[payload](port.Ext)
		p.leftToRules = !bySocket
		port.Ext = p
	}
}

// ebpfEngines keeps the engines of mode ebpf, whose sockets are counted.
type ebpfEngines struct {
	mu  sync.Mutex
	all map[v1.IPFamily]*ebpf.Engine
}

// wrap keeps the engines that a provider is made of. next may be nil.
func (e *ebpfEngines) wrap(next func(v1.IPFamily, proxier.Engine) (proxier.Engine, error)) func(v1.IPFamily, proxier.Engine) (proxier.Engine, error) {
	return func(family v1.IPFamily, engine proxier.Engine) (proxier.Engine, error) {
		if one, ok := engine.(*ebpf.Engine); ok {
			e.mu.Lock()
			defer e.mu.Unlock()
			if e.all == nil {
				e.all = map[v1.IPFamily]*ebpf.Engine{}
			}
			e.all[family] = one
		}
		if next == nil {
			return engine, nil
		}
		return next(family, engine)
	}
}

// engine returns the engine of a family, nil if there is none.
func (e *ebpfEngines) engine(family v1.IPFamily) *ebpf.Engine {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.all[family]
}

// forwarded returns the packets that were forwarded past the rules.
func (e *ebpfEngines) forwarded(family v1.IPFamily) (packets, toPeer uint64, err error) {
	engine := e.engine(family)
	if engine == nil {
		return 0, 0, proxier.ErrNotSupported
	}
	return engine.ForwardCounts()
}

// counts returns the counts of sockets.
func (e *ebpfEngines) counts(family v1.IPFamily) (connection.SocketCounts, error) {
	engine := e.engine(family)
	if engine == nil {
		return connection.SocketCounts{}, proxier.ErrNotSupported
	}
	return engine.SocketCounts()
}

// openNamespaces reads the folder of network namespaces, if there is one.
func (s *socketFlags) openNamespaces(log *zap.Logger) {
	if s.onlyIn == "" && s.skipIn == "" {
		return
	}
	s.namespaces = namespaceFolder{log: log, dir: cmp.Or(s.onlyIn, s.skipIn), list: &ebpf.Namespaces{Only: s.onlyIn != ""}, listed: map[string]os.FileInfo{}}
	if s.onlyIn != "" {
		if err := s.namespaces.add("/proc/self/ns/net"); err != nil {
			log.Warn("sockets of the node go through the rules: its network namespace cannot be read", zap.Error(err))
		}
	}
	s.namespaces.look()
}

// namespaceFolder follows the network namespaces that are mounted in a folder.
type namespaceFolder struct {
	log    *zap.Logger
	dir    string
	list   *ebpf.Namespaces       // nil without a folder
	listed map[string]os.FileInfo // by path
	failed lastFailure
}

// namespacePause is the time between two looks at the folder: until then, rules serve a new pod.
const namespacePause = time.Second

// follow is a task.
func (n *namespaceFolder) follow(ctx context.Context) error {
	if n.list == nil {
		return nil
	}
	for pause.For(ctx, namespacePause) {
		n.look()
	}
	return nil
}

// look lists what is new, and forgets what is gone. A file that is no network namespace yet is tried
// again: container runtimes create it before they mount one there.
func (n *namespaceFolder) look() {
	entries, err := os.ReadDir(n.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // nobody has made a namespace yet
		n.warn(err) // and keep those that are listed
		return
	}
	var failed error
	there := map[string]bool{}
	for _, entry := range entries {
		path := filepath.Join(n.dir, entry.Name())
		if err := n.add(path); err != nil {
			failed = err
		}
		there[path] = true
	}
	for path := range n.listed {
		if filepath.Dir(path) == n.dir && !there[path] {
			delete(n.listed, path)
			if err := n.list.Remove(path); err != nil {
				failed = err
			}
		}
	}
	n.warn(failed)
}

func (n *namespaceFolder) warn(failed error) {
	if n.failed.isNew(failed) {
		n.log.Warn("a network namespace cannot be listed for sockets, trying again", zap.String("folder", n.dir), zap.Error(failed))
	}
}

// add lists the network namespace of a path, if it is not listed yet.
func (n *namespaceFolder) add(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) { // it has just gone
		return nil
	}
	if err == nil && (n.listed[path] == nil || !os.SameFile(info, n.listed[path])) {
		if err = n.list.Add(path); err == nil {
			n.listed[path] = info
		}
	}
	return err
}
