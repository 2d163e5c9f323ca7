package iptables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// toolVersion is e.g. {1, 8, 9}.
type toolVersion [3]int

func (v toolVersion) String() string { return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]) }

// oldestVersion is the first whose restore program waits for the lock, and that supports
// MASQUERADE --random-fully.
var oldestVersion = toolVersion{1, 6, 2} // read-only

// errNotInstalled means that programs are not there, or are of the other variant. All other errors
// say nothing about what is installed: with no descriptor or memory left, no program starts.
var errNotInstalled = errors.New("not installed")

// find returns the programs of one variant: those whose names contain it, or else those
// with plain names, if they are of that variant.
func (c toolConfig) find(ctx context.Context, v Variant) (*tool, error) {
	family := "iptables"
	if c.family == v1.IPv6Protocol {
		family = "ip6tables"
	}
	var missing error
	for _, name := range []string{family + "-" + string(v), family} {
		found, err := c.findNamed(ctx, name, v)
		if !errors.Is(err, errNotInstalled) {
			return found, err
		}
		missing = cmp.Or(missing, err)
	}
	return nil, &proxier.UnsupportedError{
		Feature: family + "-" + string(v) + "-restore", Hint: "install package iptables", Err: missing,
	}
}

// findNamed finds name, name-restore and name-save. Only the first prints its version in
// all versions.
func (c toolConfig) findNamed(ctx context.Context, name string, v Variant) (*tool, error) {
	main, err1 := c.lookPath(name)
	restore, err2 := c.lookPath(name + "-restore")
	save, err3 := c.lookPath(name + "-save")
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("%w: %w", errNotInstalled, err)
	}
	version, of, err := c.programVersion(ctx, main)
	if err != nil {
		return nil, err
	}
	if of != v {
		return nil, fmt.Errorf("%w: %s is of variant %s", errNotInstalled, main, of)
	}
	return &tool{config: c, variant: v, programs: programs{restore: restore, save: save, version: version}}, nil
}

func (c toolConfig) lookPath(name string) (string, error) {
	if c.dir != "" {
		name = filepath.Join(c.dir, name)
	}
	return exec.LookPath(name)
}

// programVersion runs a program to get its version and variant.
func (c toolConfig) programVersion(ctx context.Context, program string) (toolVersion, Variant, error) {
	o, err := c.run(ctx, 0, nil, program, "-V")
	if err == nil && o.err != nil {
		err = o.plain()
	}
	if err != nil {
		return toolVersion{}, "", err
	}
	version, v, err := parseVersion(string(o.output))
	if err != nil {
		return toolVersion{}, "", fmt.Errorf("run %s -V: %w", program, err)
	}
	return version, v, nil
}

// parseVersion parses text like "iptables v1.8.9 (nf_tables)". Versions before 1.8 are of
// the legacy variant and do not print it.
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

// detect chooses one of the installed variants: the one with the kubelet's hint; else the
// one with more rules and chains; else that of the program iptables; else nft. It never guesses:
// the rules of a wrong variant would stay beside those of the right one.
func (c toolConfig) detect(ctx context.Context) (*tool, error) {
	var installed []*tool
	var missing []error
	hints, sizes := map[Variant]int{}, map[Variant]int{}
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		t, err := c.find(ctx, v)
		if errors.Is(err, proxier.ErrNotSupported) {
			missing = append(missing, err)
			continue
		}
		if err != nil {
			return nil, err
		}
		installed = append(installed, t)
		for _, table := range []string{"mangle", tableNAT, tableFilter} {
			text, err := t.save(ctx, table)
			if err != nil && !errors.Is(err, errIncompatible) {
				return nil, err
			}
			hint, size := countRules(text)
			hints[v] += hint
			sizes[v] += size
		}
	}
	switch len(installed) {
	case 0:
		return nil, errors.Join(missing...)
	case 1:
		return installed[0], nil
	}
	nft, legacy := installed[0], installed[1]
	switch more := cmp.Or(hints[VariantNFT]-hints[VariantLegacy], sizes[VariantNFT]-sizes[VariantLegacy]); {
	case more > 0:
		return nft, nil
	case more < 0:
		return legacy, nil
	}
	v, err := c.defaultVariant(ctx)
	if v == VariantLegacy {
		return legacy, err
	}
	return nft, err
}

// countRules counts the kubelet's hints in a saved table, at most one, and the rules and
// chains, except built-in chains.
func countRules(saved []byte) (hints, size int) {
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

// defaultVariant is the variant of the program iptables, nft without one.
func (c toolConfig) defaultVariant(ctx context.Context) (Variant, error) {
	if program, missing := c.lookPath("iptables"); missing == nil {
		_, v, err := c.programVersion(ctx, program)
		return v, err
	}
	return VariantNFT, nil
}
