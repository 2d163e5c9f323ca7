package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// toolConfig says whose programs to run, and how long.
type toolConfig struct {
	family  v1.IPFamily
	netNS   string  // as in namespace.Visit
	variant Variant // VariantDetect: see detect
	// lockWait is how long restore waits for the lock of the legacy variant. It is
	// rounded up to seconds, at least one.
	lockWait time.Duration
	timeout  time.Duration // of each run of a program, the wait apart
	log      *zap.Logger   // nil logs nothing
	// dir has the programs, for tests; "" means the PATH.
	dir string
	// lockFile is the lock of the legacy variant, for tests; "" means the one of
	// the machine, which all network namespaces share.
	lockFile string
}

// tool runs the programs of one variant for one IP family in one network namespace.
// It remembers nothing between runs; several goroutines may use it.
type tool struct {
	config   toolConfig
	variant  Variant // never VariantDetect
	programs programs
}

// openTool finds the programs, and checks that they and the kernel have what the
// engine needs. Afterwards the tables nat and filter exist. What lacks is a
// *proxier.UnsupportedError.
func openTool(ctx context.Context, c toolConfig) (*tool, error) {
	if c.log == nil {
		c.log = zap.NewNop()
	}
	v := c.variant
	if v == VariantDetect {
		var err error
		if v, err = c.detect(ctx); err != nil {
			return nil, err
		}
	}
	found, err := c.find(ctx, v)
	if err != nil {
		return nil, err
	}
	t := &tool{config: c, variant: v, programs: found}
	if err := t.checkVersion(); err != nil {
		return nil, err
	}
	if err := t.checkFeatures(ctx); err != nil {
		return nil, err
	}
	c.log.Info("found the programs", zap.String("variant", string(v)),
		zap.String("program", found.restore), zap.Stringer("version", found.version))
	return t, nil
}

// watcher implements watchable.
func (t *tool) watcher(owned func(chain string) bool) (watcher, error) {
	if t.variant == VariantLegacy {
		return newLegacyWatcher(t.config.family, t.config.netNS, owned)
	}
	return newNFTWatcher(t.config.family, t.config.netNS, owned)
}

// save returns what the save program prints of one table, and nothing if the table
// does not exist. It creates nothing, although iptables-legacy-save would: it is not
// run for a table that the kernel does not list.
func (t *tool) save(ctx context.Context, table string) ([]byte, error) {
	return t.config.save(ctx, t.programs.save, t.variant, table)
}

// restore has the rules in input loaded, and leaves all chains alone that input does
// not name. Each table is loaded completely or not at all; tables before the one that
// failed stay loaded. After an end of ctx or a timeout nobody knows.
//
// Errors are a *restoreError, errLocked, proxier.ErrPermission, or the end of ctx.
// Only the legacy variant has a lock, which it takes for each table anew.
func (t *tool) restore(ctx context.Context, input []byte) error {
	c := t.config
	seconds := max(1, int((c.lockWait+time.Second-1)/time.Second))
	o, err := c.run(ctx, time.Duration(seconds)*time.Second, input,
		t.programs.restore, "--noflush", "-w", strconv.Itoa(seconds))
	if err != nil || o.err == nil {
		return err
	}
	if err := o.explain(); err != nil {
		return err
	}
	return newRestoreError(o.complaint, o.err)
}

// programs are the paths of one variant's programs for one IP family.
type programs struct {
	restore, save string
	version       toolVersion
}

// toolVersion is e.g. {1, 8, 9}.
type toolVersion [3]int

func (v toolVersion) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

// oldest is the first version whose restore program waits for the lock, and that
// knows MASQUERADE --random-fully.
func oldest() toolVersion { return toolVersion{1, 6, 2} }

func (t *tool) checkVersion() error {
	needed := oldest()
	if slices.Compare(t.programs.version[:], needed[:]) >= 0 {
		return nil
	}
	return &proxier.UnsupportedError{
		Feature: fmt.Sprintf("%s %v or newer", filepath.Base(t.programs.restore), needed),
		Hint:    "update package iptables",
		Err:     fmt.Errorf("it is version %v", t.programs.version),
	}
}

// find looks for the programs of one variant: those with its name in theirs, or else
// those without, if they are of the variant.
func (c toolConfig) find(ctx context.Context, v Variant) (programs, error) {
	family := "iptables"
	if c.family == v1.IPv6Protocol {
		family = "ip6tables"
	}
	found, missing := c.findNamed(ctx, family+"-"+string(v), v)
	if missing == nil || ctx.Err() != nil {
		return found, missing
	}
	if found, err := c.findNamed(ctx, family, v); err == nil {
		return found, nil
	}
	return programs{}, &proxier.UnsupportedError{
		Feature: family + "-" + string(v) + "-restore", Hint: "install package iptables", Err: missing,
	}
}

// findNamed looks for name, name-restore and name-save. Only the first tells its
// version in all versions.
func (c toolConfig) findNamed(ctx context.Context, name string, v Variant) (programs, error) {
	main, err1 := c.look(name)
	restore, err2 := c.look(name + "-restore")
	save, err3 := c.look(name + "-save")
	if err := errors.Join(err1, err2, err3); err != nil {
		return programs{}, err
	}
	version, of, err := c.ask(ctx, main)
	if err != nil {
		return programs{}, err
	}
	if of != v {
		return programs{}, fmt.Errorf("%s is of variant %s", main, of)
	}
	return programs{restore: restore, save: save, version: version}, nil
}

func (c toolConfig) look(name string) (string, error) {
	if c.dir != "" {
		name = filepath.Join(c.dir, name)
	}
	return exec.LookPath(name)
}

// ask asks a program for its version and its variant.
func (c toolConfig) ask(ctx context.Context, program string) (toolVersion, Variant, error) {
	o, err := c.run(ctx, 0, nil, program, "-V")
	if err != nil {
		return toolVersion{}, "", err
	}
	if o.err != nil {
		return toolVersion{}, "", o.plain()
	}
	return parseVersion(string(o.output))
}

// parseVersion reads "iptables v1.8.9 (nf_tables)". Before 1.8 there was only the
// legacy variant, and it did not say so.
func parseVersion(text string) (version toolVersion, v Variant, err error) {
	_, number, _ := strings.Cut(text, " v")
	number, _, _ = strings.Cut(strings.TrimSpace(number), " ")
	for i, part := range strings.SplitN(number, ".", len(version)) {
		if version[i], err = strconv.Atoi(part); err != nil {
			return toolVersion{}, "", fmt.Errorf("find version in %q: %w", text, err)
		}
	}
	if strings.Contains(text, "(nf_tables)") {
		return version, VariantNFT, nil
	}
	return version, VariantLegacy, nil
}

// detect chooses a variant of those whose programs are there: that of the kubelet, which
// leaves a hint; that which holds more of others' rules and chains; that of the program
// iptables; nft.
func (c toolConfig) detect(ctx context.Context) (Variant, error) {
	var there []Variant
	var missing []error
	hints, sizes := map[Variant]int{}, map[Variant]int{}
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		found, err := c.find(ctx, v)
		if errors.Is(err, proxier.ErrNotSupported) {
			missing = append(missing, err)
			continue
		}
		if err != nil {
			return "", err
		}
		there = append(there, v)
		for _, table := range []string{"mangle", "nat", "filter"} {
			text, err := c.save(ctx, found.save, v, table)
			if err != nil && !errors.Is(err, errIncompatible) {
				return "", err
			}
			hint, size := weigh(text)
			hints[v] += hint
			sizes[v] += size
		}
	}
	switch len(there) {
	case 0:
		return "", errors.Join(missing...)
	case 1:
		return there[0], nil
	}
	for _, weights := range []map[Variant]int{hints, sizes} {
		if more := weights[VariantNFT] - weights[VariantLegacy]; more > 0 {
			return VariantNFT, nil
		} else if more < 0 {
			return VariantLegacy, nil
		}
	}
	return c.usual(ctx), nil
}

// weigh counts the kubelet's hints in a saved table, at most one, and the chains and
// rules that somebody has made.
func weigh(saved []byte) (hints, size int) {
	for line := range bytes.Lines(saved) {
		switch {
		case bytes.HasPrefix(line, []byte(":KUBE-IPTABLES-HINT ")), bytes.HasPrefix(line, []byte(":KUBE-KUBELET-CANARY ")):
			hints = 1
			size++
		case bytes.HasPrefix(line, []byte("-A ")), bytes.HasPrefix(line, []byte(":")) && bytes.Contains(line, []byte(" - [")):
			size++
		}
	}
	return hints, size
}

// usual is the variant of the program that people call, where both are there.
func (c toolConfig) usual(ctx context.Context) Variant {
	program, err := c.look("iptables")
	if err != nil {
		return VariantNFT
	}
	if _, v, err := c.ask(ctx, program); err == nil {
		return v
	}
	return VariantNFT
}

// errIncompatible says that somebody has used a table of iptables-nft with what that
// cannot print. iptables-nft-save says so with incompatible, and succeeds.
var errIncompatible = errors.New("the table holds rules that iptables cannot print")

const incompatible = "is incompatible, use 'nft' tool"

func (c toolConfig) save(ctx context.Context, program string, v Variant, table string) ([]byte, error) {
	if v == VariantLegacy {
		if exists, err := legacyTableExists(c.family, c.netNS, table); err != nil || !exists {
			return nil, err
		}
	}
	o, err := c.run(ctx, 0, nil, program, "-t", table)
	switch {
	case err != nil:
		return nil, err
	case o.err == nil && bytes.Contains(o.output[:min(len(o.output), maxComplaint)], []byte(incompatible)):
		return nil, fmt.Errorf("save table %s: %w", table, errIncompatible)
	case o.err == nil:
		return o.output, nil
	}
	if err := o.explain(); err != nil {
		return nil, err
	}
	return nil, o.plain()
}

// legacyTableExists says whether the legacy variant has a table in a network
// namespace. Any other question would make the kernel create it.
func legacyTableExists(family v1.IPFamily, netNS, table string) (exists bool, err error) {
	file := "/proc/thread-self/net/ip_tables_names"
	if family == v1.IPv6Protocol {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	err = namespace.Visit(netNS, func() error {
		names, err := os.ReadFile(file)
		switch {
		case errors.Is(err, fs.ErrNotExist): // nobody has used ip_tables
			return nil
		case errors.Is(err, fs.ErrPermission):
			return fmt.Errorf("%w: list tables: %w", proxier.ErrPermission, err)
		case err != nil:
			return fmt.Errorf("list tables: %w", err)
		}
		exists = slices.Contains(strings.Fields(string(names)), table)
		return nil
	})
	return exists, err
}

// feature is something that the rules use, which the kernel may lack.
type feature struct {
	name   string // of the extension: a match in lower case, a target in capitals
	rule   string
	module string
}

// scratchChain holds a rule for each feature for a moment.
const scratchChain = "SERVICEPLANE-SCRATCH"

// features are those needed in one table.
func (t *tool) features(table string) []feature {
	reject, destination := "ipt_REJECT", "192.0.2.1:80"
	if t.config.family == v1.IPv6Protocol {
		reject, destination = "ip6t_REJECT", "[2001:db8::1]:80"
	}
	if table == "nat" {
		return []feature{
			{"DNAT", "-p tcp -m tcp --dport 80 -j DNAT --to-destination " + destination, "xt_nat"},
			{"MASQUERADE", "-j MASQUERADE --random-fully", "xt_MASQUERADE"},
		}
	}
	return []feature{
		{"comment", "-m comment --comment scratch", "xt_comment"},
		{"statistic", "-m statistic --mode random --probability 0.5", "xt_statistic"},
		{"recent", "-m recent --name " + scratchChain + " --rcheck --seconds 10 --reap", "xt_recent"},
		{"addrtype", "-m addrtype --dst-type LOCAL", "xt_addrtype"},
		{"conntrack", "-m conntrack --ctstate INVALID", "xt_conntrack"},
		{"mark", "-m mark --mark 0x1/0x1", "xt_mark"},
		{"MARK", "-j MARK --or-mark 0x1", "xt_mark"},
		{"REJECT", "-j REJECT", reject},
		{"tcp", "-p tcp -m tcp --dport 80", "xt_tcpudp"},
		{"udp", "-p udp -m udp --dport 80", "xt_tcpudp"},
		{"sctp", "-p sctp -m sctp --dport 80", "xt_sctp"},
	}
}

// checkFeatures has the kernel take a rule for each feature, in a chain where no
// packet comes. The restore program's own --test does not ask the kernel, and so
// accepts what the kernel lacks; and rules that are removed in the same commit are
// never sent.
func (t *tool) checkFeatures(ctx context.Context) error {
	if t.variant == VariantLegacy {
		if err := t.ensureLegacyTables(ctx); err != nil {
			return err
		}
	}
	for _, table := range []string{"filter", "nat"} {
		all := t.features(table)
		err := t.try(ctx, table, all)
		if err == nil {
			continue
		}
		if _, refused := errors.AsType[*restoreError](err); !refused {
			return err
		}
		var missing []error
		for _, f := range all {
			if err := t.try(ctx, table, []feature{f}); err != nil {
				missing = append(missing, t.lacks(table, f, err))
			}
		}
		if len(missing) > 0 {
			return errors.Join(missing...)
		}
		// One of them may have been loaded just now.
		if err := t.try(ctx, table, all); err != nil {
			return fmt.Errorf("try features of table %s: %w", table, err)
		}
	}
	return nil
}

// try loads a rule for each feature, and removes them. If the rules are refused, there
// is nothing to remove.
func (t *tool) try(ctx context.Context, table string, features []feature) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "*%s\n:%s - [0:0]\n", table, scratchChain)
	for _, f := range features {
		fmt.Fprintf(&b, "-A %s %s\n", scratchChain, f.rule)
	}
	fmt.Fprintf(&b, "COMMIT\n*%s\n:%s - [0:0]\n-X %s\nCOMMIT\n", table, scratchChain, scratchChain)
	return t.restore(ctx, b.Bytes())
}

func (t *tool) lacks(table string, f feature, err error) error {
	hint := "load module " + f.module
	if t.variant == VariantNFT {
		hint = "load modules nft_compat and " + f.module
	}
	return &proxier.UnsupportedError{
		Feature: fmt.Sprintf("iptables extension %s in table %s", f.name, table), Hint: hint, Err: err,
	}
}

// ensureLegacyTables makes the kernel create the tables, because it tells why it
// cannot; the programs do not. But they load the module of the variant, ip_tables, which
// the kernel does not do by itself.
func (t *tool) ensureLegacyTables(ctx context.Context) error {
	p, err := openLegacyTables(t.config.family, t.config.netNS)
	if err != nil {
		return err
	}
	for _, table := range []string{"filter", "nat"} {
		if _, err = p.info(table); errors.Is(err, proxier.ErrNotSupported) {
			_ = t.restore(ctx, []byte("*"+table+"\nCOMMIT\n")) // whether that has helped, the kernel tells
			_, err = p.info(table)
		}
		if err != nil {
			break
		}
	}
	return errors.Join(err, p.close())
}
