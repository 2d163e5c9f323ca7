package history_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/history"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestModesChange runs histories in which processes of other engines follow each other: after
// each Settle nothing is left of the others, and Verify finds what the engine should have.
func TestModesChange(t *testing.T) {
	t.Parallel()
	history.Test(t, 6, 1, func(t *testing.T, seed uint64) (plane, fresh history.Plane) {
		t.Helper()
		config := proxier.Config{}
		config.Masquerade.All = seed%5 == 0
		mode := int(seed % uint64(len(modes)))
		return &modesPlane{ns: netnstest.New(t), shared: config, mode: mode}, &modesPlane{ns: netnstest.New(t), shared: config, mode: mode}
	})
}

// modes make the engine of a family.
var modes = []func(proxier.Config, v1.IPFamily) (proxier.Engine, error){
	func(c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{Config: c}, family, proxier.Deps{})
	},
	iptablesMode(iptables.VariantNFT),
	iptablesMode(iptables.VariantLegacy),
}

func iptablesMode(variant iptables.Variant) func(proxier.Config, v1.IPFamily) (proxier.Engine, error) {
	return func(c proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
		return iptables.NewEngine(iptables.Config{Config: c, Variant: variant}, family, proxier.Deps{})
	}
}

// modesPlane is a network namespace whose processes have one of several engines.
type modesPlane struct {
	ns     *netns.NS
	shared proxier.Config
	mode   int
}

// SetMode implements history.Modes.
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
		e, err := modes[p.mode](config, family)
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

func (e *calledEngine) Unwrap() proxier.Engine { return e.Engine }

func (e *calledEngine) Apply(ctx context.Context, u desired.Update) (result proxier.Result, err error) {
	err = e.calls.Do(func() error {
		result, err = e.Engine.Apply(ctx, u)
		return err
	})
	return result, err
}

// CleanOthers implements history.Modes.
func (p *modesPlane) CleanOthers(ctx context.Context) error {
	var errs []error
	for mode, newEngine := range modes {
		if mode == p.mode {
			continue
		}
		config, engines := p.Config(), map[v1.IPFamily]proxier.Engine{}
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			e, err := newEngine(config, family)
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

// Kernel implements history.Plane. Of the nftables engine it has only the tables: the rest
// depends on the history, and Verify compares it.
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
	slices.Sort(lines)
	return strings.Join(lines, "\n"), err
}
