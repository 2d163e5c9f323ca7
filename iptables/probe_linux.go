package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

func (t *tool) checkVersion() error {
	needed := oldestVersion
	if slices.Compare(t.programs.version[:], needed[:]) >= 0 {
		return nil
	}
	return &proxier.UnsupportedError{
		Feature: fmt.Sprintf("%s %v or newer", filepath.Base(t.programs.restore), needed),
		Hint:    "update package iptables",
		Err:     fmt.Errorf("it is version %v", t.programs.version),
	}
}

// feature is an extension that the rules use and that the kernel may lack.
type feature struct {
	name   string // a match in lower case, a target in upper case
	rule   string
	module string
}

// features returns the features that one table needs.
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
		{"recent", "-m recent --name " + t.config.names.scratch() + " --rcheck --seconds 10 --reap", "xt_recent"},
		{"addrtype", "-m addrtype --dst-type LOCAL", "xt_addrtype"},
		{"conntrack", "-m conntrack --ctstate INVALID", "xt_conntrack"},
		{"mark", "-m mark --mark 0x1/0x1", "xt_mark"},
		{"MARK", "-j MARK --or-mark 0x1", "xt_mark"},
		{"REJECT", "-p tcp -j REJECT --reject-with tcp-reset", reject},
		{"tcp", "-p tcp -m tcp --dport 80", "xt_tcpudp"},
		{"udp", "-p udp -m udp --dport 80", "xt_tcpudp"},
		{"sctp", "-p sctp -m sctp --dport 80", "xt_sctp"},
	}
}

// checkFeatures loads a rule for each feature into a chain that no packet reaches. The
// --test option of the restore programs would not do: it does not ask the kernel. Rules
// that are deleted in the same commit are not sent to the kernel either.
func (t *tool) checkFeatures(ctx context.Context) error {
	if t.variant == VariantLegacy {
		if err := t.ensureLegacyTables(ctx); err != nil {
			return err
		}
	}
	for _, table := range []string{"filter", "nat"} {
		all := t.features(table)
		err := t.tryFeatures(ctx, table, all)
		if err == nil {
			continue
		}
		if !isUnknown(err) {
			return err
		}
		var missing []error
		for _, f := range all {
			err := t.tryFeatures(ctx, table, []feature{f})
			if isUnknown(err) {
				missing = append(missing, t.missingFeature(table, f, err))
			} else if err != nil {
				return err
			}
		}
		if len(missing) > 0 {
			return errors.Join(missing...)
		}
		// The failed attempts may have loaded a module.
		if err := t.tryFeatures(ctx, table, all); err != nil {
			return fmt.Errorf("try features of table %s: %w", table, err)
		}
	}
	return nil
}

// exhausted matches what the programs print if they or the kernel have no memory or no descriptors left.
var exhausted = regexp.MustCompile(`(?i)alloc(ate)? memory|memory allocation|too many open files|no buffer space`)

// isUnknown reports whether a rule was refused, and not because there was no memory or no descriptor
// left: that tells nothing about the kernel's features.
func isUnknown(err error) bool {
	refused, is := errors.AsType[*restoreError](err)
	return is && !exhausted.MatchString(refused.Text)
}

// tryFeatures loads a rule for each feature, and deletes the chain. If the rules are
// refused, nothing was loaded. The chain has a name of the instance: if the process dies between
// the two commits, a later Cleanup or sync deletes it.
func (t *tool) tryFeatures(ctx context.Context, table string, features []feature) error {
	var b bytes.Buffer
	scratch := t.config.names.scratch()
	fmt.Fprintf(&b, "*%s\n:%s - [0:0]\n", table, scratch)
	for _, f := range features {
		fmt.Fprintf(&b, "-A %s %s\n", scratch, f.rule)
	}
	fmt.Fprintf(&b, "COMMIT\n*%s\n:%s - [0:0]\n-X %s\nCOMMIT\n", table, scratch, scratch)
	return t.restore(ctx, b.Bytes())
}

func (t *tool) missingFeature(table string, f feature, err error) error {
	hint := "load module " + f.module
	if t.variant == VariantNFT {
		hint = "load modules nft_compat and " + f.module
	}
	return &proxier.UnsupportedError{
		Feature: fmt.Sprintf("iptables extension %s in table %s", f.name, table), Hint: hint, Err: err,
	}
}

// ensureLegacyTables makes the kernel create the tables. Unlike the programs, the kernel
// returns the reason of a failure. But only the programs load the module ip_tables.
func (t *tool) ensureLegacyTables(ctx context.Context) error {
	p, err := openLegacyTables(t.config.family, t.config.netNS)
	if err != nil {
		return err
	}
	for _, table := range []string{"filter", "nat"} {
		if _, err = p.info(table); errors.Is(err, proxier.ErrNotSupported) {
			_ = t.restore(ctx, []byte("*"+table+"\nCOMMIT\n")) // loads ip_tables; info returns whether that helped
			_, err = p.info(table)
		}
		if err != nil {
			break
		}
	}
	return errors.Join(err, p.close())
}
