package ebpf_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// everyDeath is 1 for all steps.
var everyDeath = flag.Int("deaths.every", 12, "of the steps at which a process can die, take one in `N`; when maps grow, in 8 N")

// scene is a process with the objects that it programs, of one IP family.
type scene struct {
	Family     v1.IPFamily
	NetNS      string
	Node       changetracker.Node
	Masquerade proxier.Masquerade
	BPFFS      string
	Cgroup     string
	Hosts      []string // network namespaces
	RealPeer   bool
	Endpoint   string // of the Service
	Other      string // the endpoint of the other Services
	Others     int
	Before     *scene // what the process programs first
	DieAt      int64  // the step
}

// process is a Provider that runs.
type process struct {
	*proxier.Proxier
	engine *ebpf.Engine
	writes atomic.Int64
}

// ObserveSync counts.
func (p *process) ObserveSync(r proxier.SyncReport) { p.writes.Add(int64(r.Apply.Writes)) }

// start programs the objects. stop ends the Provider, and leaves what is in the kernel.
func (s *scene) start(t *testing.T, step func()) (p *process, stop func()) {
	t.Helper()
	p = &process{}
	namespaces := &ebpf.Namespaces{Only: true}
	for _, host := range s.Hosts {
		netnstest.Check(t, namespaces.Add(host))
	}
	config := proxier.Config{
		NetNS: s.NetNS, Node: s.Node, Masquerade: s.Masquerade, Families: []v1.IPFamily{s.Family},
		Runner: runner.Options{MinInterval: runner.Unlimited},
	}
	engine, err := ebpf.NewEngine(ebpf.Config{
		Config:  nftables.Config{Config: config},
		Sockets: ebpf.Sockets{BPFFS: s.BPFFS, Cgroups: []string{s.Cgroup}, Namespaces: namespaces, RealPeer: s.RealPeer},
	}, s.Family, proxier.Deps{})
	netnstest.Check(t, err)
	if step != nil {
		engine.Interrupt(step)
	}
	p.engine = engine
	p.Proxier, err = proxier.New(config, proxier.Deps{Observer: p}, map[v1.IPFamily]proxier.Engine{s.Family: engine})
	netnstest.Check(t, err)
	s.program(p)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	stop = poll.Background(t, p.Run)
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	return p, stop
}

// program says what there is.
func (s *scene) program(p *process) {
	for i := range 1 + s.Others {
		name, addr, endpoint := "web", vip(s.Family).Addr(), s.Endpoint
		if i > 0 {
			name, addr, endpoint = fmt.Sprint("other-", i), otherVIP(s.Family, i), s.Other
		}
		p.OnServiceUpdate(nil, proxiertest.Service("default", name, proxiertest.ClusterIPs(addr.String()), proxiertest.Port("web", v1.ProtocolTCP, 80)))
		p.OnEndpointSliceUpdate(nil, proxiertest.Slice("default", name, discovery.AddressType(s.Family),
			proxiertest.SlicePort("web", v1.ProtocolTCP, 8080), proxiertest.Endpoint(endpoint)))
	}
}

func otherVIP(family v1.IPFamily, i int) netip.Addr {
	if family == v1.IPv6Protocol {
		return netip.AddrFrom16([16]byte{0: 0xfd, 14: 1, 15: byte(i)})
	}
	return netip.AddrFrom4([4]byte{10, 96, 1, byte(i)})
}

// deathOf is the environment variable with a process that dies.
const deathOf = "SERVICEPLANE_EBPF_DEATH"

// TestDeathAtEachStep kills a process with SIGKILL before each of its changes to the kernel, at the start, in a
// change, while maps grow, and while programs and pins of another version are replaced. Connections then reach
// what the Service had before or has after the change, also at each step of the process that follows. That one
// completes the change, leaves no other pins, and has nothing to write when it starts again.
func TestDeathAtEachStep(t *testing.T) {
	if text := os.Getenv(deathOf); text != "" {
		die(t, text)
		return
	}
	world := proxiertest.NewTopology(t)
	pods := world.RemotePods
	type death struct {
		before, after scene
		changes       bool // one process does both
		older         bool // the process before had another layout
		nothing       bool // there was none
		thinner       int64
	}
	for name, of := range map[string]death{
		"start":    {after: scene{Others: 3}, nothing: true},
		"restart":  {before: scene{Others: 3}, after: scene{Others: 5}},
		"change":   {before: scene{Others: 3}, after: scene{Others: 3}, changes: true},
		"growth":   {before: scene{Others: 60}, after: scene{Others: 100}, changes: true, thinner: 8}, // 91 fit
		"settings": {before: scene{Others: 3}, after: scene{Others: 3, RealPeer: true}},
		"layout":   {before: scene{Others: 3}, after: scene{Others: 3}, older: true},
	} {
		for _, family := range families {
			t.Run(name+"/"+string(family), func(t *testing.T) {
				c, s := of, sockets(t)
				fill := func(to *scene, endpoint *proxiertest.Host) {
					config := world.Config()
					to.Family, to.NetNS, to.Node, to.Masquerade = family, config.NetNS, config.Node, config.Masquerade
					to.BPFFS, to.Cgroup, to.Hosts = s.BPFFS, s.Cgroups[0], []string{world.LocalPods[0].NetNS(), config.NetNS}
					to.Endpoint, to.Other = endpoint.Addr(family).String(), pods[2].Addr(family).String()
				}
				fill(&c.before, pods[0])
				fill(&c.after, pods[1])
				every := int64(*everyDeath) * max(c.thinner, 1)
				for step := 1 + rand.Int64N(every); ; step += every {
					if !c.nothing && !c.changes {
						_, stop := c.before.start(t, nil)
						stop()
					}
					if c.older {
						layout, err := filepath.Glob(filepath.Join(s.BPFFS, "serviceplane", "*", "ip[46]", "v1"))
						netnstest.Check(t, err)
						netnstest.Check(t, os.Rename(layout[0], filepath.Join(filepath.Dir(layout[0]), "v0")))
					}
					dying := c.after
					if dying.DieAt = step; c.changes {
						dying.Before = &c.before
					}
					died := dying.run(t)
					reach := func() {
						answer, err := world.LocalPods[0].Ask(t.Context(), "tcp", vip(family), proxiertest.AskOptions{})
						if err != nil || !slices.Contains([]string{pods[0].Name, pods[1].Name}, answer.Server) {
							t.Fatalf("died before step %d: answer %+v, error %v; want one of the Service's endpoints", step, answer, err)
						}
					}
					if c.nothing {
						reach = func() {}
					}
					reach()
					c.after.recovers(t, world, reach)
					if !died {
						t.Logf("%d steps, one in %d", step, every)
						return
					}
				}
			})
		}
	}
}

// run runs a process of its own, and reports whether it was killed.
func (s *scene) run(t *testing.T) (died bool) {
	t.Helper()
	text, err := json.Marshal(s)
	netnstest.Check(t, err)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDeathAtEachStep$", "-test.count=1")
	cmd.Env = append(os.Environ(), deathOf+"="+string(text))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL { //nolint:forcetypeassert // so it is on Linux
		return true
	}
	if err != nil {
		t.Fatalf("the process: %v\n%s", err, out)
	}
	return false
}

// die is the process.
func die(t *testing.T, text string) {
	t.Helper()
	var s scene
	netnstest.Check(t, json.Unmarshal([]byte(text), &s))
	var steps atomic.Int64
	counts := s.Before == nil
	step := func() {
		if counts && steps.Add(1) == s.DieAt {
			netnstest.Check(t, syscall.Kill(os.Getpid(), syscall.SIGKILL))
			select {} // until it arrives
		}
	}
	if s.Before == nil {
		_, stop := s.start(t, step)
		stop()
		return
	}
	p, stop := s.Before.start(t, step)
	counts = true
	s.program(p)
	netnstest.Check(t, proxiertest.Sync(t.Context(), p))
	stop()
}

// recovers starts a process that has nobody to fear, and one after it.
func (s *scene) recovers(t *testing.T, world *proxiertest.Topology, reach func()) {
	t.Helper()
	_, stop := s.start(t, reach)
	stop()
	p, stop := s.start(t, nil)
	defer stop()
	if writes := p.writes.Load(); writes > 0 {
		t.Errorf("the second start writes %d objects", writes)
	}
	before, err := p.engine.SocketCounts()
	netnstest.Check(t, err)
	for _, i := range []int{0, 1, s.Others} {
		to, want := vip(s.Family), world.RemotePods[1].Name
		if i > 0 {
			to, want = netip.AddrPortFrom(otherVIP(s.Family, i), 80), world.RemotePods[2].Name
		}
		if answer, err := world.LocalPods[0].Ask(t.Context(), "tcp", to, proxiertest.AskOptions{}); err != nil || answer.Server != want {
			t.Errorf("%v: answer %+v, error %v; want %s", to, answer, err, want)
		}
	}
	after, err := p.engine.SocketCounts()
	netnstest.Check(t, err)
	if n := after.Translated - before.Translated; n != 3 {
		t.Errorf("%d sockets translated, want 3", n)
	}
	netnstest.Check(t, filepath.WalkDir(filepath.Join(s.BPFFS, "serviceplane"), func(path string, _ os.DirEntry, err error) error {
		if strings.Contains(path, "-new") || strings.Contains(path, "/v0") {
			t.Errorf("%s is left", path)
		}
		return err
	}))
	netnstest.Check(t, p.Cleanup(t.Context()))
}
