package iptables

import (
	"context"
	"errors"
	"slices"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/proxier"
)

// Cleanup implements proxier.Engine: see NewEngine.
func (e *engine) Cleanup(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.trusted = false
	var tools []kernel
	var errs []error
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		if e.config.Variant != VariantDetect && e.config.Variant != variant {
			continue
		}
		t, err := e.toolConfig(variant).find(ctx, variant)
		if err != nil {
			errs = append(errs, err)
		} else {
			tools = append(tools, t)
		}
	}
	if len(tools) > 0 { // a variant that is not installed has no chains
		errs = slices.DeleteFunc(errs, func(err error) bool { return errors.Is(err, proxier.ErrNotSupported) })
	}
	if err := e.restoreLocalnet(ctx, tools); err != nil {
		return errors.Join(append(errs, err)...) // the rule must stay
	}
	for _, t := range tools {
		errs = append(errs, e.cleanTables(ctx, t))
	}
	return errors.Join(append(errs, e.removeCounters())...)
}

// restoreLocalnet restores route_localnet if this process or a predecessor has set it.
func (e *engine) restoreLocalnet(ctx context.Context, tools []kernel) error {
	names, errs := e.config.chains(), []error{}
	for _, t := range tools {
		o, err := observe(ctx, t, tableFilter, names)
		e.localnet.note(o.chains[names.localnet()])
		errs = append(errs, err)
	}
	return errors.Join(append(errs, e.localnet.restore())...)
}

func (e *engine) cleanTables(ctx context.Context, k kernel) error {
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
		want := ruleset{}
		o.discard(want)
		c := changeOf(o.chains, want, false)
		c.first.deletes, _, _ = repairJumps(nil, o.jumps)
		s.add(table, &c.first)
	}
	if s.b.Len() == 0 {
		return nil
	}
	return k.restore(ctx, s.b.Bytes())
}

// keepLocalnet removes the chain that keeps other hosts from loopback addresses from o,
// and so from what is deleted, if it is still needed.
func (e *engine) keepLocalnet(o *observed, chain string) error {
	rules, err := e.localnet.rules(o.chains[chain], false)
	if err != nil || rules == nil {
		return err
	}
	e.log.Warn("kept the rule that drops packets from other hosts to 127.0.0.0/8: another program has set route_localnet for all interfaces; if none needs it, set it to 0 and clean up again",
		zap.String("setting", routeLocalnet), zap.String("chain", chain))
	delete(o.chains, chain)
	o.jumps = slices.DeleteFunc(o.jumps, func(j jump) bool { return j.to == chain })
	return nil
}
