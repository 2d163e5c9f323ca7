package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/bpfx"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest/history"
)

// TestHistories runs random histories of the cluster, the process, the kernel and other programs,
// which change links, pins and maps: see package history.
func TestHistories(t *testing.T) { t.Parallel(); history.Test(t, 4, 2, historyPlanes) }

// TestEachCallOfAHistory lets each change of maps, links, pins and rules fail.
func TestEachCallOfAHistory(t *testing.T) { t.Parallel(); history.TestEachCall(t, historyPlanes) }

// TestHistoriesCatchPlantedBugs checks the histories themselves.
func TestHistoriesCatchPlantedBugs(t *testing.T) {
	t.Parallel()
	history.TestPlanted(t, 1, historyPlanes)
}

func historyPlanes(t *testing.T, seed uint64) (plane, fresh history.Plane) {
	t.Helper()
	shared := proxier.Config{Masquerade: proxier.Masquerade{All: seed%5 == 0}}
	if seed%4 > 0 { // otherwise sockets carry nothing
		shared.Masquerade.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}
	}
	udp := seed/2%2 == 1 && canDestroy(v1.IPv4Protocol) == nil // Linux 6.5 or newer, and it allows the programs
	cgroup := bpftest.NewCgroup(t)
	newPlane := func() history.Plane {
		return &historyPlane{tb: t, ns: netnstest.New(t), shared: shared, sockets: Sockets{
			BPFFS: bpftest.FileSystem(t), Cgroups: []string{cgroup}, PodsKeepSource: seed%2 == 1, UDP: udp, RealPeer: seed%3 == 0, Namespaces: &Namespaces{Only: true},
		}}
	}
	return newPlane(), newPlane()
}

// historyPlane is a network namespace with a BPF file system.
type historyPlane struct {
	tb      testing.TB
	ns      *netns.NS
	shared  proxier.Config
	sockets Sockets
}

// Config implements history.Plane.
func (p *historyPlane) Config() proxier.Config {
	c := p.shared
	c.NetNS = p.ns.Path()
	return c
}

func (p *historyPlane) engine(config proxier.Config, family v1.IPFamily) (*Engine, error) {
	can := func(v1.IPFamily) error { return nil } // as historyPlanes knows: to ask takes a tenth of a second
	return newEngine(Config{Config: nftables.Config{Config: config}, Sockets: p.sockets}, family, proxier.Deps{}, can)
}

// Engines implements history.Plane. A process that has died writes to no memory.
func (p *historyPlane) Engines(config proxier.Config, calls *history.Calls) (map[v1.IPFamily]proxier.Engine, error) {
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		e, err := p.engine(config, family)
		if err != nil {
			return nil, err
		}
		e.interpose(calls.Do, func(write func()) {
			if !calls.Dead() {
				write()
			}
		})
		e.rules, e.watch = calledRules{e.rules, calls}, 20*time.Millisecond
		engines[family] = e
	}
	return engines, nil
}

// calledRules lets a history decide about each change of the rules.
type calledRules struct {
	proxier.Engine

	calls *history.Calls
}

func (r calledRules) Apply(ctx context.Context, u desired.Update) (result proxier.Result, err error) {
	err = r.calls.Do(func() error {
		result, err = r.Engine.Apply(ctx, u)
		return err
	})
	return result, err
}

func (r calledRules) Cleanup(ctx context.Context) error {
	return r.calls.Do(func() error { return r.Engine.Cleanup(ctx) })
}

// Kernel implements history.Plane: what is pinned, where links lead, and what the frontends in the
// maps lead to. Of the rules it has the names of the tables: Verify compares the rest.
func (p *historyPlane) Kernel() (string, error) {
	var lines []string
	err := filepath.WalkDir(filepath.Join(p.sockets.BPFFS, "serviceplane"), func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // or it is gone since its folder was read
			return nil
		}
		lines = append(lines, p.pin(path))
		return err
	})
	if err != nil {
		return "", err
	}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		more, err := p.frontends(family)
		if err != nil {
			return "", err
		}
		lines = append(lines, more...)
	}
	if tables := p.nft("list tables"); tables != "" {
		lines = append(lines, strings.Split(tables, "\n")...)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n"), nil
}

// pin describes a file without the numbers that differ between objects of one kind.
func (p *historyPlane) pin(path string) string {
	text := strings.TrimPrefix(path, p.sockets.BPFFS)
	text = regexp.MustCompile(`links-[0-9a-f]{16}`).ReplaceAllString(text, "links")
	if !regexp.MustCompile(`/[cg][a-z0-9_]+-\d+$`).MatchString(text) {
		return text
	}
	text = text[:strings.LastIndex(text, "-")]
	one, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return text + ": " + err.Error()
	}
	defer func() { _ = bpfx.Close(one) }()
	program, attached := programOf(one)
	return fmt.Sprintf("%s: attached %t, with the program beside it %t", text, attached, program == besides(path))
}

// frontends reads the pinned maps.
func (p *historyPlane) frontends(family v1.IPFamily) (lines []string, err error) {
	e, err := p.engine(p.Config(), family)
	if err != nil {
		return nil, err
	}
	pinned, found, err := e.closedPrograms().loadTables()
	if err != nil || !found {
		return nil, err
	}
	defer func() { _ = pinned.close() }()
	all, err := pinned.frontends()
	for at, to := range all {
		endpoints, ok := pinned.endpointsOf(to, pinned.capacity())
		lines = append(lines, fmt.Sprintf("frontend %v: scope %d, endpoints %v, %t", at, to.scope, endpoints.Slice(), ok))
	}
	return lines, err
}

func (p *historyPlane) nft(command string) string {
	var out []byte
	netnstest.Check(p.tb, p.ns.Do(func() error {
		out, _ = exec.Command("nft", strings.Fields(command)...).Output() // what it should change may not be there
		return nil
	}))
	return strings.TrimSpace(string(out))
}

// Damage implements history.Plane. The contents of maps are compared by full syncs only, so they
// are changed while no process runs.
func (p *historyPlane) Damage(number int, _ *history.Objects) {
	family := []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}[number%2]
	e, err := p.engine(p.Config(), family)
	netnstest.Check(p.tb, err)
	dir, dice := e.closedPrograms().dir, rand.New(rand.NewPCG(uint64(number), 0))
	pins := func(pattern string) string {
		all, _ := filepath.Glob(filepath.Join(dir, pattern)) // the pattern is not malformed
		if len(all) == 0 {
			return ""
		}
		return all[dice.IntN(len(all))]
	}
	kind := number / 2 % 8
	if kind >= 6 && isLocked(filepath.Dir(dir)) {
		kind -= 6
	}
	switch kind {
	case 0, 1:
		changeLink(pins("links-*/[cg]*"), kind == 0, family)
	case 2:
		_ = os.Remove(pins("links-*/*"))
	case 3:
		_ = os.Remove(pins("maps/*"))
	case 4:
		_ = os.RemoveAll(filepath.Dir(dir))
	case 5:
		p.nft("flush ruleset")
	case 6:
		changeMap(pins("maps/frontends"), dice)
	default:
		changeMap(pins("maps/endpoints"), dice)
	}
}

// isLocked reports whether a process holds the folder of a family.
func isLocked(dir string) bool {
	file, err := os.Open(dir)
	if err != nil {
		return false
	}
	defer file.Close()
	return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
}

// changeLink detaches a link, or gives it a program that does nothing.
func changeLink(path string, detach bool, family v1.IPFamily) {
	one, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return
	}
	defer func() { _ = bpfx.Close(one) }()
	if detach {
		_ = one.Detach()
		return
	}
	for _, at := range hooks(family, true) { // the kernel refuses those of other hooks
		program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Type: ebpf.CGroupSockAddr, AttachType: at, License: "MIT",
			Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
		})
		if err == nil {
			_ = one.Update(program)
			_ = bpfx.Close(program)
		}
	}
}

// changeMap overwrites or deletes some of the entries.
func changeMap(path string, dice *rand.Rand) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return
	}
	defer func() { _ = bpfx.Close(m) }()
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	var keys [][]byte
	for all := m.Iterate(); all.Next(&key, &value); {
		keys = append(keys, slices.Clone(key))
	}
	for _, key := range keys {
		switch dice.IntN(4) {
		case 0:
			_ = m.Delete(key) // an array refuses it
		case 1:
			for i := range value {
				value[i] = byte(dice.IntN(4))
			}
			_ = m.Put(key, value)
		}
	}
}
