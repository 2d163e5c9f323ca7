package iptables

import (
	"context"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Verify is for proxier.Abilities: see NewEngine.
func (e *engine) Verify(ctx context.Context, update desired.Update) (proxier.Verification, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.connect(ctx); err != nil {
		return proxier.Verification{}, err
	}
	m := e.newModel(update.Globals)
	v := &verification{model: m, program: "iptables", owners: sync.OnceValue(m.owners)}
	if e.family == v1.IPv6Protocol {
		v.program = "ip6tables"
	}
	v.model.plan(&update)
	want := v.model.allChains()
	for _, table := range []string{tableNAT, tableFilter} {
		have, err := observe(ctx, e.kernel, table, v.model.names)
		if err != nil {
			return proxier.Verification{}, err
		}
		if table == tableFilter {
			if err := v.expectLocalnet(&e.localnet, &have, want[table]); err != nil {
				return proxier.Verification{}, err
			}
		}
		v.table(table, want[table], &have)
	}
	return v.report, nil
}

// newModel is the model of a full update.
func (e *engine) newModel(globals desired.Globals) *model {
	m := newModel(&e.config, e.family, globals)
	m.counts = e.counts
	liberal, _ := isSet(e.config.NetNS, tcpBeLiberal) // false if it cannot be read
	m.config.KeepInvalid = e.config.KeepInvalid || liberal
	return m
}

// verification compares tables with a model.
type verification struct {
	model   *model
	program string                                                          // "iptables" or "ip6tables"
	owners  func() func(chain string, r rule) changetracker.ServicePortName // of model
	report  proxier.Verification
}

// expectLocalnet adds the rules that keep other hosts from loopback addresses. Whether they
// include the record depends on who has set route_localnet, and they may stay when they are
// no longer needed.
func (v *verification) expectLocalnet(l *localnet, o *observed, want ruleset) error {
	chain := v.model.names.localnet()
	have := o.chains[chain]
	if v.model.localhost() {
		if slices.Contains(have, localnetRecord) {
			want[chain] = append(localnetRules(), localnetRecord)
		}
		return nil
	}
	if have == nil {
		return nil
	}
	isSet, err := l.read()
	if isSet {
		want[chain], v.model.keepsLocalnet = localnetRules(), true
	}
	return err
}

func (v *verification) table(table string, want ruleset, have *observed) {
	where := " in table " + table + " of " + v.program
	referenced := have.referenced()
	for chain, rules := range want {
		if had, ok := have.chains[chain]; ok {
			v.report.Checked++
			v.rules(chain, where, rules, had)
			continue
		}
		v.differs("chain "+chain+where, proxier.DifferenceMissing, chain, "")
	}
	for chain, rules := range have.chains {
		if _, ok := want[chain]; !ok && (len(rules) > 0 || !referenced[chain]) {
			v.differs("chain "+chain+where, proxier.DifferenceUnexpected, chain, "")
		}
	}
	jumps := v.model.jumps()[table]
	v.report.Checked += len(jumps)
	deletes, inserts, _ := repairJumps(jumps, have.jumps)
	for _, command := range deletes {
		v.differs("rule -A "+strings.TrimPrefix(command, "-D ")+where, proxier.DifferenceUnexpected, "", "")
	}
	for _, command := range inserts {
		fields := strings.SplitN(command, " ", 4) // -I chain 1 rule
		v.differs("rule -A "+fields[1]+" "+fields[3]+where, proxier.DifferenceMissing, "", "")
	}
}

// rules compares the rules of a chain, and then their order.
func (v *verification) rules(chain, where string, want, have []rule) {
	v.report.Checked += len(want)
	if slices.Equal(want, have) {
		return
	}
	missing, unexpected := without(want, have), without(have, want)
	for _, r := range missing {
		v.differs("rule -A "+chain+" "+string(r)+where, proxier.DifferenceMissing, chain, r)
	}
	for _, r := range unexpected {
		v.differs("rule -A "+chain+" "+string(r)+where, proxier.DifferenceUnexpected, chain, r)
	}
	if len(missing)+len(unexpected) == 0 {
		v.report.Differences = append(v.report.Differences, proxier.Difference{
			Object: "order of the rules of chain " + chain + where, Problem: proxier.DifferenceChanged,
			Want: joinRules(want), Have: joinRules(have), Service: v.owners()(chain, ""),
		})
	}
}

func joinRules(rules []rule) string {
	texts := make([]string, len(rules))
	for i, r := range rules {
		texts[i] = string(r)
	}
	return strings.Join(texts, "; ")
}

// differs adds a difference of an object whose name is its whole content.
func (v *verification) differs(object, problem, chain string, r rule) {
	v.report.Differences = append(v.report.Differences, proxier.Difference{Object: object, Problem: problem, Service: v.owners()(chain, r)})
}
