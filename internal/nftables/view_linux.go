package nftables

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

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
		if v.layout.rules.has(&setSpecs[i]) {
			v.printSet(&b, &setSpecs[i])
		}
	}
	for _, f := range v.flows {
		f.print(&b)
	}
	for i := range v.chains {
		v.printLimitSets(&b, v.chains[i].name)
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

// printLimitSets prints the sets of the class that has a chain, without the clients.
func (v *view) printLimitSets(b *strings.Builder, chain string) {
	c, _ := parseLimit(chain)
	for _, s := range c.limitSets() {
		fmt.Fprintf(b, "\n\tset %s { # written by packets\n\t\ttype %s\n\t\tsize %d\n\t}\n", s.Name, typeName(s.Key, v.addrLen()), s.Size)
	}
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
