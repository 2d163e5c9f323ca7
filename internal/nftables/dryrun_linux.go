package nftables

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// Plan is for proxier.Abilities.
func (e *Engine) Plan(update desired.Update) (string, error) { return e.plan(update, nil) }

func (e *Engine) plan(update desired.Update, holds func(netip.Addr) bool) (string, error) {
	scratch, err := NewEngine(e.config, e.family, proxier.Deps{})
	if err != nil {
		return "", err
	}
	scratch.holds, scratch.behind = holds, e.behind
	scratch.fast.Store(e.fast.Load())
	scratch.begin(scratch.layoutFor(&update.Globals), false)
	t := &scratch.step
	scratch.placeAllInto(&update, t)
	v := view{layout: &scratch.state.layout, table: e.config.Names.Table, verdicts: map[setID][]string{}}
	for class, to := range staticClasses() {
		v.lead(class, to.chain, to.from)
	}
	if scratch.fastAfter() > 0 {
		v.flows = []flowtable{wantedFlowtable()}
	}
	v.chains = scratch.state.layout.chains()
	for _, c := range t.classes {
		v.lead(uint32(c), c.chain(), c.reachedFrom())
		v.chains = append(v.chains, scratch.state.layout.classChain(c))
	}
	v.elements = func(s *setSpec) []string {
		if slices.Contains(intervalSets(), s.id) {
			return prefixTexts(prefixesOf(&update.Globals, s.id))
		}
		return elementTexts(s, v.addrLen(), t.adds[s.id].buf)
	}
	var b strings.Builder
	err = v.print(&b)
	return b.String(), err
}

// placeAllInto adds all elements of a new table to one transaction.
func (e *Engine) placeAllInto(update *desired.Update, t *transaction) {
	for s := range update.Services() {
		e.change(t, s.Name, s)
	}
	e.state.flushCounts(t)
}

// Dump is for proxier.Abilities.
func (e *Engine) Dump(ctx context.Context, w io.Writer) error {
	if err := e.connect(); err != nil {
		return err
	}
	o, err := e.observe(ctx)
	if err != nil {
		return err
	}
	l := e.state.layout
	if l.rules.mark == 0 {
		l = e.layoutFor(&desired.Globals{})
	}
	if o == nil {
		_, err := fmt.Fprintf(w, "# no table %s %s\n", l.nftFamily(), e.config.Names.Table)
		return err
	}
	v := view{layout: &l, table: e.config.Names.Table, chains: append(l.chains(), o.classChains(&l)...), verdicts: map[setID][]string{}}
	for _, name := range slices.Sorted(maps.Keys(o.flows)) {
		v.flows = append(v.flows, o.flows[name])
	}
	encoded := map[setID][]byte{}
	for i := range setSpecs {
		spec := &setSpecs[i]
		reset := func() { encoded[spec.id], v.verdicts[spec.id] = nil, nil }
		err := e.listElements(ctx, spec, reset, func(el element) {
			if el.chain != "" {
				v.lead(binary.NativeEndian.Uint32(el.key), el.chain, []setID{spec.id})
				return
			}
			encoded[spec.id] = appendElement(encoded[spec.id], el.key, el.keyEnd, el.data)
		})
		if err != nil {
			return err
		}
	}
	v.elements = func(s *setSpec) []string { return elementTexts(s, v.addrLen(), encoded[s.id]) }
	return v.print(w)
}

// view prints a table.
type view struct {
	layout   *layout
	table    string
	chains   []chainSpec
	verdicts map[setID][]string
	elements func(*setSpec) []string
	flows    []flowtable
}

func (v *view) addrLen() int { return v.layout.addrLen() }

func (v *view) lead(class uint32, chain string, from []setID) {
	for _, in := range from {
		v.verdicts[in] = append(v.verdicts[in], fmt.Sprintf("%#08x : %s %s", class, setSpecs[in].verdict(), chain))
	}
}

func (v *view) print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "table %s %s {\n\tcomment %q\n", v.layout.nftFamily(), v.table, tableComment)
	for i := range setSpecs {
		v.printSet(&b, &setSpecs[i])
	}
	for _, f := range v.flows {
		f.print(&b)
	}
	for i := range v.chains {
		if err := v.printChain(&b, &v.chains[i]); err != nil {
			return err
		}
	}
	b.WriteString("}\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (v *view) printSet(b *strings.Builder, s *setSpec) {
	kind, typ := "set", typeName(s.key, v.addrLen())
	if s.data != nil {
		kind, typ = "map", typ+" : "+typeName(s.data, v.addrLen())
	}
	fmt.Fprintf(b, "\n\t%s %s { # %s\n\t\ttype %s\n", kind, s.name, s.note, typ)
	elements := append(slices.Clone(v.verdicts[s.id]), v.elements(s)...)
	slices.Sort(elements)
	for _, e := range elements {
		fmt.Fprintf(b, "\t\t%s\n", e)
	}
	b.WriteString("\t}\n")
}

func (v *view) printChain(b *strings.Builder, c *chainSpec) error {
	fmt.Fprintf(b, "\n\tchain %s {\n", c.name)
	if c.hook != nil {
		fmt.Fprintf(b, "\t\tcomment %q\n", layoutVersion)
		fmt.Fprintf(b, "\t\ttype %s hook %s priority %d; policy accept;\n", c.hook.kind, c.hook.name, c.hook.priority)
	}
	for _, r := range c.rules {
		exprs, _, err := r.encode(v.layout.family())
		if err != nil {
			return err
		}
		fmt.Fprintf(b, "\t\t%s\n", ruleText(v.layout.family(), exprs))
	}
	b.WriteString("\t}\n")
	return nil
}
