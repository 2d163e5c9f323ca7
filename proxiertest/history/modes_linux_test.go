package history_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest/history"
)

// TestModesChange runs histories in which processes of other engines follow each other: after
// each Converge nothing is left of the others, and Verify finds what the engine should have.
func TestModesChange(t *testing.T) {
	t.Parallel()
	history.Test(t, 6, 1, func(t *testing.T, seed uint64) (plane, fresh history.Plane) {
		t.Helper()
		config := proxier.Config{}
		config.Masquerade.All = seed%5 == 0
		config.Masquerade.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}
		cgroup := bpftest.NewCgroup(t)
		newPlane := func() history.Plane {
			p := &modesPlane{ns: netnstest.New(t), shared: config, sockets: ebpf.Sockets{BPFFS: bpftest.FileSystem(t), Cgroups: []string{cgroup}}}
			p.SetMode(int(seed % uint64(len(modes))))
			return p
		}
		return newPlane(), newPlane()
	})
}

// mode makes the engine of a family.
type mode func(*modesPlane, proxier.Config, v1.IPFamily) (proxier.Engine, error)

// modes have nftables first and ebpf, whose rules are the table of nftables, last.
var modes = []mode{
	func(_ *modesPlane, c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{Config: c}, family, proxier.Deps{})
	},
	iptablesMode(iptables.VariantNFT),
	iptablesMode(iptables.VariantLegacy),
	func(p *modesPlane, c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
		return ebpf.NewEngine(p.ebpf(c), family, proxier.Deps{})
	},
}

const modeNFTables, modeEBPF = 0, 3

func iptablesMode(variant iptables.Variant) mode {
	return func(_ *modesPlane, c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
		return iptables.NewEngine(iptables.Config{Config: c, Variant: variant}, family, proxier.Deps{})
	}
}

// modesPlane is a network namespace, with a BPF file system, whose processes have one of several engines.
type modesPlane struct {
	ns      *netns.NS
	shared  proxier.Config
	sockets ebpf.Sockets
	mode    int
}

func (p *modesPlane) ebpf(c proxier.Config) ebpf.Config {
	return ebpf.Config{Config: nftables.Config{Config: c}, Sockets: p.sockets}
}

// SetMode chooses the engine of the processes that start later.
func (p *modesPlane) SetMode(number int) { p.mode = number % len(modes) }

// Config implements history.Plane.
func (p *modesPlane) Config() proxier.Config {
	c := p.shared
	c.NetNS = p.ns.Path()
	return c
}

// Engines implements history.Plane.
func (p *modesPlane) Engines(config proxier.Config, calls *history.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		e, err := modes[p.mode](p, config, family)
		if err != nil {
			return nil, err
		}
		engines[family] = &calledEngine{e, calls}
	}
	return engines, nil
}

// calledEngine lets a history decide about each Apply.
type calledEngine struct {
	proxier.Engine

	calls *history.Calls
}

func (e *calledEngine) Apply(ctx context.Context, u desired.Update) (result proxier.Result, err error) {
	err = e.calls.Do(func() error {
		result, err = e.Engine.Apply(ctx, u)
		return err
	})
	return result, err
}

// CleanOthers removes what the other engines have programmed.
func (p *modesPlane) CleanOthers(ctx context.Context) error {
	var errs []error
	for mode, newEngine := range modes {
		config, engines := p.Config(), map[v1.IPFamily]proxier.Engine{}
		switch {
		case mode == p.mode, mode == modeNFTables && p.mode == modeEBPF:
			continue
		case mode == modeEBPF:
			errs = append(errs, ebpf.RemoveSockets(p.ebpf(config)))
			continue
		}
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			e, err := newEngine(p, config, family)
			engines[family] = e
			errs = append(errs, err)
		}
		other, err := proxier.New(config, proxier.Deps{}, engines)
		if err != nil {
			return err
		}
		errs = append(errs, other.Cleanup(ctx))
	}
	return errors.Join(errs...)
}

// Damage implements history.Plane.
func (p *modesPlane) Damage(number int, _ *history.Objects) {
	all := [][]string{
		{"nft", "flush", "ruleset"},
		{"nft", "delete", "table", "ip", proxier.DefaultNames().Table},
		{"nft", "delete", "table", "ip6", proxier.DefaultNames().Table},
		{"iptables-nft", "-w", "-t", "nat", "-F"},
		{"ip6tables-nft", "-w", "-F"},
		{"iptables-legacy", "-w", "-t", "nat", "-F"},
		{"ip6tables-legacy", "-w", "-F"},
	}
	_, _ = p.run(all[number%len(all)]...) // it may be gone already
}

func (p *modesPlane) run(command ...string) (text string, err error) {
	var out []byte
	err = p.ns.Do(func() (err error) {
		out, err = exec.Command(command[0], command[1:]...).Output()
		return err
	})
	if err != nil {
		err = fmt.Errorf("%s: %w", command, err)
	}
	return string(out), err
}

// links is a folder, whose name depends on the namespace.
var links = regexp.MustCompile(`links-[0-9a-f]+`)

// Kernel implements history.Plane. Of the engines nftables and ebpf it has only the tables and the
// names of pins: the rest depends on the history, and Verify compares it.
func (p *modesPlane) Kernel() (string, error) {
	var lines []string
	add := func(keep func(line string) bool, command ...string) error {
		text, err := p.run(command...)
		for line := range strings.Lines(text) {
			line = strings.TrimSpace(line)
			if keep(line) {
				line, _, _ = strings.Cut(line, " [")
				lines = append(lines, command[0]+" "+line)
			}
		}
		return err
	}
	err := add(func(line string) bool { return strings.HasSuffix(line, " "+proxier.DefaultNames().Table) }, "nft", "list", "tables")
	for _, program := range []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"} {
		err = errors.Join(err, add(func(line string) bool {
			return strings.HasPrefix(line, "-A ") || strings.HasPrefix(line, ":") && strings.Contains(line, " - [")
		}, program))
	}
	err = errors.Join(err, filepath.WalkDir(filepath.Join(p.sockets.BPFFS, "serviceplane"), func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // or it is gone since its folder was read
			return nil
		}
		path = links.ReplaceAllString(strings.TrimPrefix(path, p.sockets.BPFFS), "links")
		lines = append(lines, "pin "+path)
		return err
	}))
	slices.Sort(lines)
	return strings.Join(lines, "\n"), err
}
