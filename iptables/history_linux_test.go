package iptables

import (
	"cmp"
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/history"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
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

func eachHistoryVariant(t *testing.T, test func(*testing.T, history.Planes)) {
	t.Helper()
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			test(t, func(t *testing.T, seed uint64) (plane, fresh history.Plane) {
				t.Helper()
				p := historyPlane{ns: netnstest.New(t), variant: variant, localhost: seed%2 == 0, lockFile: filepath.Join(t.TempDir(), "lock")}
				p.shared.Masquerade.All = seed%5 == 0
				p.shared.NodePorts.Primary = seed%7 == 0
				f := p
				f.ns = netnstest.New(t)
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
}

// Config implements history.Plane.
func (p historyPlane) Config() proxier.Config {
	c := p.shared
	c.NetNS = p.ns.Path()
	return c
}

// Engines implements history.Plane.
func (p historyPlane) Engines(config proxier.Config, calls *history.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		e, err := NewEngine(Config{Config: config, Variant: p.variant, LocalhostNodePorts: p.localhost}, family, proxier.Deps{})
		if err != nil {
			return nil, err
		}
		e.watchPeriod /= 50
		e.open = func(ctx context.Context) (k kernel, err error) {
			c := e.toolConfig(p.variant)
			c.lockFile = p.lockFile
			err = calls.Do(func() error {
				t, err := openTool(ctx, c)
				k = &calledTool{t, calls}
				return err
			})
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
}

func (t *calledTool) save(ctx context.Context, table string) (text []byte, err error) {
	err = t.calls.Do(func() error {
		text, err = t.tool.save(ctx, table)
		return err
	})
	return text, err
}

func (t *calledTool) restore(ctx context.Context, input []byte) error {
	return t.calls.Do(func() error { return t.tool.restore(ctx, input) })
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
	for _, args := range all[number/2%len(all)] {
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
		for _, table := range []string{"nat", "filter", "mangle"} {
			var out []byte
			err := p.ns.Do(func() (err error) {
				out, err = p.command(program+"-"+string(p.variant)+"-save", "-t", table).Output()
				return err
			})
			if err != nil {
				return "", fmt.Errorf("save table %s: %w", table, err)
			}
			lines = append(lines, normalLines(program+" "+table, string(out))...)
		}
	}
	slices.SortStableFunc(lines, func(a, b string) int { return cmp.Compare(chainOf(a), chainOf(b)) })
	return strings.Join(lines, "\n"), nil
}

// normalLines are the chains and rules of a saved table, without counters and without the
// built-in chains themselves.
func normalLines(where, saved string) (lines []string) {
	for line := range strings.Lines(saved) {
		line = strings.TrimSpace(line)
		isOwn := strings.HasPrefix(line, ":") && strings.Contains(line, " - [")
		if line, _, _ = strings.Cut(line, " ["); isOwn || strings.HasPrefix(line, "-A ") {
			lines = append(lines, where+" "+line)
		}
	}
	return lines
}

// chainOf returns the program, table and chain of a line.
func chainOf(line string) string {
	fields := strings.Fields(line)
	if strings.HasPrefix(fields[2], ":") {
		return strings.Join(fields[:2], " ") + " " + fields[2][1:]
	}
	return strings.Join(fields[:2], " ") + " " + fields[3]
}
