package iptables

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/proxiertest/history"
)

// TestHistories runs random histories of the cluster, the process, the iptables programs and
// other programs: see package history.
func TestHistories(t *testing.T) {
	t.Parallel()
	eachHistoryVariant(t, func(t *testing.T, planes history.Planes) { t.Helper(); history.Test(t, 2, 2, planes) })
}

// TestEachCallOfAHistory lets each run of a program fail.
func TestEachCallOfAHistory(t *testing.T) {
	t.Parallel()
	eachHistoryVariant(t, history.TestEachCall)
}

// TestHistoriesCatchPlantedBugs checks the histories themselves.
func TestHistoriesCatchPlantedBugs(t *testing.T) {
	t.Parallel()
	eachHistoryVariant(t, func(t *testing.T, planes history.Planes) {
		t.Helper()
		history.TestPlanted(t, 0, planes)
	})
}

// TestChangesBesideEachRunOfAProgram: another program replaces a rule after each run, also
// before the engine has read what it has written, so that the number of rules stays; or it
// deletes all chains before each run, so that the program refuses what the engine writes.
func TestChangesBesideEachRunOfAProgram(t *testing.T) {
	t.Parallel()
	const deletesAll, replacesRuleOfServices = 2 * 2, 2 * 10 // in IPv4: see historyDamages
	eachHistoryVariant(t, func(t *testing.T, planes history.Planes) {
		t.Helper()
		plane, fresh := planes(t, 1)
		for call := range 7 {
			for damage, late := range map[int]bool{deletesAll: false, replacesRuleOfServices: true} {
				at := history.Event{Kind: history.DamageAt, Call: call, Late: late, Damage: damage}
				steps := slices.Concat(aService("10.96.0.1"), []history.Event{at}, aService("10.96.0.2"))
				if err := history.Run(t.Context(), plane, fresh, steps, time.Minute); err != nil {
					t.Fatalf("%v: %v", &at, err)
				}
			}
		}
	})
}

// aService changes a Service and an EndpointSlice.
func aService(ip string) []history.Event {
	web := proxiertest.Service("ns", "a", proxiertest.ClusterIPs(ip), proxiertest.Port("http", v1.ProtocolTCP, 80))
	slice := proxiertest.Slice("ns", "a", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.5"))
	return []history.Event{
		{Kind: history.SetNode, Node: changetracker.Node{Name: "here"}},
		{Kind: history.SetService, Service: web},
		{Kind: history.SetSlice, Slice: slice},
		{Kind: history.RunSync},
		{Kind: history.Converge},
	}
}

func eachHistoryVariant(t *testing.T, test func(*testing.T, history.Planes)) {
	t.Helper()
	for _, variant := range variants(t) {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			test(t, func(t *testing.T, seed uint64) (plane, fresh history.Plane) {
				t.Helper()
				p := historyPlane{ns: netnstest.New(t), variant: variant, localhost: seed%2 == 0, lockFile: filepath.Join(t.TempDir(), "lock"), lost: &lostRecord{}}
				p.shared.Masquerade.All = seed%5 == 0
				p.shared.NodePorts.Primary = seed%7 == 0
				f := p
				f.ns, f.tools = netnstest.New(t), &sync.Map{}
				return p, f
			})
		})
	}
}

// historyPlane is a network namespace for histories.
type historyPlane struct {
	ns        *netns.NS
	variant   Variant
	localhost bool
	lockFile  string
	shared    proxier.Config
	lost      *lostRecord
	// tools, unless nil, are found and checked once for all processes.
	tools *sync.Map
}

// tool opens the programs of a family.
func (p historyPlane) tool(ctx context.Context, c toolConfig) (*tool, error) {
	if p.tools == nil {
		return openTool(ctx, c)
	}
	if t, ok := p.tools.Load(c.family); ok {
		return t.(*tool), nil
	}
	t, err := openTool(ctx, c)
	if err == nil {
		p.tools.Store(c.family, t)
	}
	return t, err
}

// Config implements history.Plane.
func (p historyPlane) Config() proxier.Config {
	c := p.shared
	c.NetNS = p.ns.Path()
	return c
}

// Engines implements history.Plane.
func (p historyPlane) Engines(config proxier.Config, calls *history.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	p.lost.lost.CompareAndSwap(false, p.lost.flushed.Load())
	p.lost.known.Store(false)
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		e, err := newEngine(Config{Config: config, Variant: p.variant, RouteLocalnet: p.localhost}, family, proxier.Deps{})
		if err != nil {
			return nil, err
		}
		e.watchPeriod /= 50
		e.open = func(ctx context.Context) (k kernel, err error) {
			c := e.toolConfig(p.variant)
			c.lockFile = p.lockFile
			err = calls.DoOrHang(func() error {
				t, err := p.tool(ctx, c)
				k = &calledTool{t, calls, p.lost}
				return err
			}, func() error { return hangs(ctx, c) })
			return k, err
		}
		engines[family] = e
	}
	return engines, nil
}

// calledTool lets a history decide about each run of a program.
type calledTool struct {
	*tool

	calls *history.Calls
	lost  *lostRecord
}

func (t *calledTool) save(ctx context.Context, table string) (text []byte, err error) {
	err = t.calls.DoOrHang(func() error {
		text, err = t.tool.save(ctx, table)
		return err
	}, func() error { return hangs(ctx, t.config) })
	t.learn(text, err)
	return text, err
}

func (t *calledTool) restore(ctx context.Context, input []byte) error {
	err := t.calls.DoOrHang(func() error { return t.tool.restore(ctx, input) }, func() error { return hangs(ctx, t.config) })
	t.learn(input, err)
	return err
}

// learn says that the process knows who has set route_localnet.
func (t *calledTool) learn(text []byte, err error) {
	if err == nil && bytes.Contains(text, []byte(localnetRecord)) {
		t.lost.known.Store(true)
	}
}

// hangs runs a program that does not end, as the engine runs those of iptables.
func hangs(ctx context.Context, c toolConfig) error {
	c.timeout = 50 * time.Millisecond
	_, err := c.run(ctx, 0, nil, "sleep", "600")
	return err
}

// Damage implements history.Plane.
func (p historyPlane) Damage(number int, o *history.Objects) {
	var service string
	for name, s := range o.Services {
		if len(s.Spec.Ports) > 0 {
			service = chainNames{proxier.DefaultNames().ChainPrefix}.cluster(identity(portName(s.Namespace, name, "http")))
		}
	}
	program := []string{"iptables", "ip6tables"}[number%2] + "-" + string(p.variant)
	all := historyDamages(service)
	damage := all[number/2%len(all)]
	if p.localhost && program == "iptables-"+string(p.variant) && len(damage[0]) == 1 { // filter
		p.lost.flushed.Store(true)
		p.lost.lost.CompareAndSwap(false, !p.lost.known.Load())
	}
	for _, args := range damage {
		_ = p.ns.Do(func() error { return p.command(program, append([]string{"-w"}, args...)...).Run() }) // it may be gone already
	}
}

// historyDamages are commands of iptables that change objects of ours. service is the
// chain of a service port.
func historyDamages(service string) [][][]string {
	n := chainNames{proxier.DefaultNames().ChainPrefix}
	return [][][]string{
		{{"-t", "nat", "-F"}},
		{{"-F"}},
		{{"-t", "nat", "-F"}, {"-t", "nat", "-X"}},
		{{"-t", "nat", "-F", service}},
		{{"-t", "nat", "-F", n.mark()}, {"-t", "nat", "-F", n.services()}, {"-t", "nat", "-F", n.nodePorts()}},
		{{"-t", "nat", "-D", n.postrouting(), "1"}},
		{{"-t", "nat", "-A", n.mark(), "-j", "RETURN"}},
		{{"-t", "nat", "-D", "PREROUTING", "1"}},
		{{"-t", "nat", "-R", service, "1", "-j", "RETURN"}},
		{{"-t", "nat", "-R", n.mark(), "1", "-j", "MARK", "--or-mark", "0x1"}},
		{{"-t", "nat", "-R", n.services(), "1", "-j", "RETURN"}},
		{{"-t", "nat", "-R", "PREROUTING", "1", "-p", "sctp", "-j", n.services()}},
		{{"-t", "nat", "-R", "OUTPUT", "1", "-j", n.mark()}},
		{{"-R", n.forward(), "1", "-j", "RETURN"}},
	}
}

func (p historyPlane) command(name string, args ...string) *exec.Cmd {
	c := exec.Command(name, args...)
	c.Env = append(c.Environ(), "XTABLES_LOCKFILE="+p.lockFile)
	return c
}

// Kernel implements history.Plane: it reads what the programs save.
func (p historyPlane) Kernel() (string, error) {
	var lines []string
	for _, program := range []string{"iptables", "ip6tables"} {
		var out []byte
		err := p.ns.Do(func() (err error) {
			out, err = p.command(program + "-" + string(p.variant) + "-save").Output()
			return err
		})
		if err != nil {
			return "", fmt.Errorf("save the tables of %s: %w", program, err)
		}
		lines = append(lines, p.lost.without(normalLines(program, string(out)))...)
	}
	return strings.Join(lines, "\n"), nil
}

// normalLines are the chains of all saved tables, sorted, each with its rules, without
// counters. Built-in chains without rules are left out.
func normalLines(program, saved string) (lines []string) {
	chains, table := map[string][]string{}, ""
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		isOwn := strings.HasPrefix(line, ":") && strings.Contains(line, " - [")
		line, _, _ = strings.Cut(line, " [")
		switch name, _, _ := strings.Cut(strings.TrimPrefix(line[min(1, len(line)):], "A "), " "); {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case isOwn, strings.HasPrefix(line, "-A "):
			chains[table+" "+name] = append(chains[table+" "+name], program+" "+table+" "+line)
		}
	}
	for _, chain := range slices.Sorted(maps.Keys(chains)) {
		lines = append(lines, chains[chain]...)
	}
	return lines
}

// lostRecord says whether both planes leave out the rules that keep other hosts from loopback
// addresses: if another program flushes them, and the process dies before it repairs them, or has
// not read them yet, nobody knows any more that route_localnet was 0 before. Then they stay, with the setting.
type lostRecord struct{ known, flushed, lost atomic.Bool }

func (l *lostRecord) without(lines []string) []string {
	if slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, "route_localnet was 0 before") }) {
		l.flushed.Store(false)
	}
	if !l.lost.Load() {
		return lines
	}
	return slices.DeleteFunc(lines, func(line string) bool { return strings.Contains(line, proxier.DefaultNames().ChainPrefix+"-LOCALNET") })
}
