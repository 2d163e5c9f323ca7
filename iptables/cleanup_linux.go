package iptables

import (
	"context"
	"errors"
	"slices"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/proxier"
)

// Cleanup implements proxier.Engine. It looks at both variants, because a
// predecessor may have used the other one. A chain of ours that a rule of somebody
// else's chain jumps to is emptied, and stays; so does the rule that keeps other hosts
// from loopback addresses, while route_localnet is set and not by us.
func (e *Engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.trusted = false
	var tools []kernel
	var errs []error
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
		} else {
			tools = append(tools, t)
		}
	}
	if len(tools) > 0 { // a variant that is not there has nothing of ours
		errs = slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, proxier.ErrNotSupported) })
	}
	if err := e.closeLocalnet(ctx, tools); err != nil {
		return errors.Join(append(errs, err)...) // the rule must stay
	}
	for _, t := range tools {
		errs = append(errs, e.cleanTables(ctx, t))
	}
	return errors.Join(errs...)
}

// closeLocalnet sets route_localnet back, if this engine or another one of the instance
// has set it.
func (e *Engine) closeLocalnet(ctx context.Context, tools []kernel) error {
	names, errs := e.config.chains(), []error{e.resetLocalnet(nil)}
	for _, t := range tools {
		o, err := observe(ctx, t, tableFilter, names)
		errs = append(errs, err, e.resetLocalnet(o.chains[names.localnet()]))
	}
	return errors.Join(errs...)
}

// observe reads a table.
func observe(ctx context.Context, k kernel, table string, names chainNames) (observed, error) {
	text, err := k.save(ctx, table)
	if err != nil {
		return observed{}, err
	}
	return parse(text, names.owns)
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
	names := e.config.chains()
	s := newScript()
	for _, table := range []string{tableFilter, tableNAT, "mangle"} {
		o, err := observe(ctx, k, table, names)
		if err != nil {
			return err
		}
		if table == tableFilter {
			if err := e.keepLocalnet(&o, names.localnet()); err != nil {
				return err
			}
		}
		s.add(table, removal(o))
	}
	if s.b.Len() == 0 {
		return nil
	}
	return k.restore(ctx, s.b.Bytes())
}

// keepLocalnet leaves the rule that keeps other hosts from loopback addresses out of what
// is removed, if it is still needed.
func (e *Engine) keepLocalnet(o *observed, chain string) error {
	rules, err := e.guardLocalnet(o.chains[chain], false)
	if err != nil || rules == nil {
		return err
	}
	e.log.Warn("the rule that keeps other hosts from 127.0.0.0/8 stays: route_localnet is 1, and this instance did not set it: set it to 0, and clean up again",
		zap.String("chain", chain))
	delete(o.chains, chain)
	o.jumps = slices.DeleteFunc(o.jumps, func(j foreignJump) bool { return j.to == chain })
	return nil
}

// removal empties and deletes all chains of ours.
func removal(o observed) *tablePart {
	p := &tablePart{chains: ruleset{}}
	p.deletes, _ = repairJumps("", nil, o.jumps)
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
