package iptables

import (
	"context"
	"errors"
	"slices"

	"github.com/serviceplane/serviceplane/proxier"
)

// Cleanup implements proxier.Engine. It looks at both variants, because a
// predecessor may have used the other one. A chain of ours that a rule of somebody
// else's chain jumps to is emptied, and stays.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.trusted = false
	var errs []error
	found := false
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		if e.config.Variant != VariantDetect && e.config.Variant != variant {
			continue
		}
		t, err := findTool(ctx, toolConfig{
			family: e.family, netNS: e.config.NetNS, variant: variant,
			lockWait: e.config.LockWait, timeout: e.config.Timeout, log: e.log,
		})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		found = true
		errs = append(errs, e.cleanTables(ctx, t))
	}
	if found { // a variant that is not there has nothing of ours
		errs = slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, proxier.ErrNotSupported) })
	}
	return errors.Join(append(errs, e.restoreLocalnet())...)
}

// findTool is openTool without a look at what the kernel can do, which would create
// tables.
func findTool(ctx context.Context, c toolConfig) (*tool, error) {
	found, err := c.find(ctx, c.variant)
	if err != nil {
		return nil, err
	}
	return &tool{config: c, variant: c.variant, programs: found}, nil
}

func (e *Engine) cleanTables(ctx context.Context, k kernel) error {
	names := chainNames{e.config.Names.ChainPrefix}
	s := newScript()
	for _, table := range []string{tableFilter, tableNAT, "mangle"} {
		text, err := k.save(ctx, table)
		if err != nil {
			return err
		}
		o, err := parse(text, names.owns)
		if err != nil {
			return err
		}
		s.add(table, removal(o))
	}
	if s.b.Len() == 0 {
		return nil
	}
	return k.restore(ctx, s.b.Bytes())
}

// removal empties and deletes all chains of ours.
func removal(o observed) *tablePart {
	p := &tablePart{chains: ruleset{}}
	p.deletes, _ = settleJumps("", nil, o.jumps)
	held := o.held()
	for chain := range o.chains {
		if held[chain] {
			p.chains[chain] = []rule{}
		} else {
			p.gone = append(p.gone, chain)
		}
	}
	slices.Sort(p.gone)
	return p
}
