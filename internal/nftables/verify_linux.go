package nftables

import (
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
)

// Verify is for proxier.Abilities.
func (e *Engine) Verify(ctx context.Context, update desired.Update) (proxier.Verification, error) {
	return e.verify(ctx, &update, nil)
}

func (e *Engine) verify(ctx context.Context, update *desired.Update, holds func(netip.Addr) bool) (proxier.Verification, error) {
	if err := e.connect(); err != nil {
		return proxier.Verification{}, err
	}
	scratch, err := e.scratch()
	if err != nil {
		return proxier.Verification{}, err
	}
	scratch.holds, scratch.behind = holds, e.behind
	scratch.begin(scratch.layoutFor(&update.Globals), false)
	v := scratch.verification(update)
	if err := v.read(ctx, e); err != nil {
		return proxier.Verification{}, err
	}
	return v.compareAll(v.planned)
}

// scratch returns an engine of the same kind that knows nothing of the kernel.
func (e *Engine) scratch() (*Engine, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.scratchLocked()
}

func (e *Engine) scratchLocked() (*Engine, error) {
	scratch, err := NewEngine(e.config, e.family, proxier.Deps{})
	if err != nil {
		return nil, err
	}
	scratch.open = e.open
	scratch.hash.Store(e.hash.Load())
	scratch.fast.Store(e.fast.Load())
	scratch.limits.Store(e.limits.Load())
	scratch.asksForLimits = e.asksForLimits
	if e.counts != nil {
		scratch.counts.missing = e.counts.missing
	}
	return scratch, nil
}

// verification compares the table in the kernel with placements of service ports. Those that are planned from scratch
// take over the indexes and numbers of the kernel, because any are right that are consistent.
type verification struct {
	scratch *Engine
	update  *desired.Update
	layout  *layout
	have    *observation // nil: there is no table
	*record              // of elements that are not compared
	// comparable are the sets that exist with their shape.
	comparable [numSets]bool
	owners     map[string]changetracker.ServicePortName
	service    changetracker.ServicePortName // whose elements are compared
	where      string
	report     proxier.Verification
	// absent are elements that the reading lacks, if it is not nil: then they are no differences yet.
	absent map[elementKey]absent
}

// absent is an element that a reading lacks.
type absent struct {
	proxier.Difference

	key, want string // with the end of the key, and the data
}

// verification returns one without content. The engine has begun a new state.
func (e *Engine) verification(update *desired.Update) *verification {
	l := &e.state.layout
	return &verification{scratch: e, update: update, layout: l, record: &record{}, where: " in table " + l.nftFamily() + " " + e.config.Names.Table}
}

// read reads the table with the socket of an engine, and compares what is in no set. It ends early if it is disturbed.
func (v *verification) read(ctx context.Context, by *Engine) (err error) {
	if v.have, err = by.observe(ctx); err != nil || v.have == nil {
		return err
	}
	v.table()
	v.sets()
	if err := by.verifyFlowtables(ctx, v); err != nil {
		return err
	}
	return by.observeSets(ctx, v.have, func(s *setSpec) bool {
		return v.comparable[s.id] && !by.packetsWrite(s) && !v.disturbed.Load()
	})
}

// compareAll compares the rest with these service ports.
func (v *verification) compareAll(services iter.Seq2[changetracker.ServicePortName, *placed]) (proxier.Verification, error) {
	if v.have == nil {
		v.differs(proxier.Difference{Object: v.where[len(" in "):], Problem: proxier.DifferenceMissing})
		return v.report, nil
	}
	v.elements(services)
	v.intervals()
	v.verdicts()
	return v.report, v.chains()
}

func (v *verification) differs(d proxier.Difference) {
	v.report.Differences = append(v.report.Differences, d)
	v.report.Checked++
}

// compare compares the texts of an object; "" is none.
func (v *verification) compare(object, want, have string) {
	switch {
	case want == have:
		v.report.Checked++
	case want == "":
		v.differs(proxier.Difference{Object: object, Problem: proxier.DifferenceUnexpected, Have: have})
	case have == "":
		v.differs(proxier.Difference{Object: object, Problem: proxier.DifferenceMissing, Want: want})
	default:
		v.differs(proxier.Difference{Object: object, Problem: proxier.DifferenceChanged, Want: want, Have: have})
	}
}

func (v *verification) table() {
	v.compare(v.where[len(" in "):], "comment "+tableComment, "comment "+v.have.comment+either(v.have.dormant, ", dormant", ""))
}

func (v *verification) sets() {
	known := map[string]bool{}
	for i := range setSpecs {
		s := &setSpecs[i]
		if known[s.name] = v.layout.rules.has(s); !known[s.name] {
			continue
		}
		have, exists := v.have.sets[s.name]
		want := s.shape(v.layout.addrLen())
		v.compare(s.kind()+" "+s.name+v.where, "shape "+want, either(exists, "shape "+have.shape, ""))
		v.comparable[s.id] = exists && have.shape == want
	}
	for _, id := range v.have.catches {
		v.compare("element * of "+setSpecs[id].kind()+" "+setSpecs[id].name+v.where, "", "catch-all")
	}
	for chain := range v.have.chains { // that of a class, with sets of its own
		for name, shape := range limitShapes(chain, v.layout.addrLen()) {
			have, exists := v.have.sets[name]
			known[name] = true
			v.compare("set "+name+v.where, "shape "+shape, either(exists, "shape "+have.shape, ""))
		}
	}
	for name, s := range v.have.sets {
		if !known[name] && !s.anonymous {
			v.compare("set "+name+v.where, "", "shape "+s.shape)
		}
	}
}

// kind is what nft calls the set.
func (s *setSpec) kind() string { return either(s.data != nil, "map", "set") }

// planned yields the service ports of the update, planned from scratch.
func (v *verification) planned(yield func(changetracker.ServicePortName, *placed) bool) {
	v.scratch.state.classes.keepLimits(v.have, v.update, v.layout.rules.v6)
	hints := (&takeover{v.scratch, v.have, true}).hints(v.update)
	for s := range v.update.Services() {
		if !yield(s.Name, v.scratch.planElements(hints[s.Name], s, &v.scratch.step)) {
			return
		}
	}
}

// elements compares the elements of service ports.
func (v *verification) elements(services iter.Seq2[changetracker.ServicePortName, *placed]) {
	for name, p := range services {
		if v.service = name; name.Name == "" { // one that a Front refuses
			v.service = changetracker.ServicePortName{}
		}
		v.scratch.state.count(p, 1)
		diff(v, nil, p)
	}
	v.service = changetracker.ServicePortName{}
	v.scratch.state.flushCounts(v)
	for id := range v.have.element {
		spec := &setSpecs[id]
		for key, data := range v.have.element[id] {
			keyLen := nft.Padded(spec.key, v.layout.addrLen())
			if v.written[elementKey{spec.id, elementOf(key[:keyLen])}] {
				continue
			}
			v.differs(proxier.Difference{
				Object: v.elementName(spec, key[:keyLen], key[keyLen:]), Problem: proxier.DifferenceUnexpected,
				Have: v.dataText(spec, data), Service: v.ownerOf(spec, key),
			})
		}
	}
}

// put implements elementSink. What remains of the observation is unexpected.
func (v *verification) put(in setID, key, keyEnd, data elementBytes) {
	if !v.comparable[in] {
		return // which is a difference of the set
	}
	spec, k, want := &setSpecs[in], string(key.bytes())+string(keyEnd.bytes()), string(data.bytes())
	have, ok := v.have.element[in][k]
	delete(v.have.element[in], k)
	if ok && have == want {
		v.report.Checked++
		return
	}
	if v.written[elementKey{in, key}] {
		return
	}
	d := proxier.Difference{
		Object: v.elementName(spec, string(key.bytes()), string(keyEnd.bytes())), Problem: proxier.DifferenceMissing,
		Want: v.dataText(spec, want), Service: v.service,
	}
	switch {
	case ok:
		d.Problem, d.Have = proxier.DifferenceChanged, v.dataText(spec, have)
		v.differs(d)
	case v.absent != nil:
		v.absent[elementKey{in, key}] = absent{d, k, want}
	default:
		v.differs(d)
	}
}

// decide compares an element that was absent with the answers of the kernel.
func (v *verification) decide(a absent, spec *setSpec, answers map[string]string) {
	switch have, there := answers[a.key]; {
	case there && have == a.want:
		v.report.Checked++
		return
	case there:
		a.Problem, a.Have = proxier.DifferenceChanged, v.dataText(spec, have)
	}
	v.differs(a.Difference)
}

func (v *verification) remove(setID, elementBytes, elementBytes) {}

func (v *verification) elementName(spec *setSpec, key, keyEnd string) string {
	return "element " + fieldsText(spec.key, v.layout.addrLen(), []byte(key), []byte(keyEnd)) + " of " + spec.kind() + " " + spec.name + v.where
}

// dataText is the data of an element, with the chain that a class stands for.
func (v *verification) dataText(spec *setSpec, data string) string {
	text := fieldsText(spec.data, v.layout.addrLen(), []byte(data), nil)
	if len(spec.data) != 1 || spec.data[0] != nft.Mark || len(data) != 4 {
		return text
	}
	c := class(binary.NativeEndian.Uint32([]byte(data)))
	static, ok := staticClasses()[uint32(c)]
	switch {
	case ok:
		return text + " (" + static.chain + ")"
	case c&classOfCount == classOfCount, c.isLimit(), c.isGate():
		return text + " (" + c.chain() + ")"
	default:
		return text
	}
}

// ownerOf is the service port with the frontend or the affinity number of an element's key.
func (v *verification) ownerOf(spec *setSpec, key string) changetracker.ServicePortName {
	if v.owners == nil {
		v.owners = map[string]changetracker.ServicePortName{}
		for s := range v.update.Services() {
			for i := range s.Frontends {
				v.owners[keyString(frontendKey(s.Key(&s.Frontends[i])))] = s.Name
			}
		}
		for name, numbers := range v.scratch.state.affinity.services {
			v.owners[keyString(markData(numbers.key()))] = name
		}
	}
	switch {
	case spec.id == setAffinityCounts || spec.id == setAffinityEndpoints:
		return v.owners[keyString(markData(binary.NativeEndian.Uint32([]byte(key))&affinityIDMask))]
	case len(spec.key) >= len(vipFields) && slices.Equal(spec.key[:len(vipFields)], vipFields):
		return v.owners[key[:nft.Padded(vipFields, v.layout.addrLen())]]
	case slices.Equal(spec.key[:1], nodePortFields[:1]) && spec.id != setHealthPorts:
		return v.owners[key[:nft.Padded(nodePortFields, v.layout.addrLen())]]
	default:
		return changetracker.ServicePortName{}
	}
}

// intervals compares the sets with the globals.
func (v *verification) intervals() {
	for _, id := range intervalSets() {
		if !v.comparable[id] {
			continue
		}
		want, have := ranges(prefixesOf(&v.update.Globals, id)), v.have.ranges[id]
		report := func(r addrRange, problem string) {
			object := v.elementName(&setSpecs[id], string(r.first.AsSlice()), string(r.last.AsSlice()))
			v.differs(proxier.Difference{Object: object, Problem: problem})
		}
		for _, r := range want {
			if slices.Contains(have, r) {
				v.report.Checked++
			} else {
				report(r, proxier.DifferenceMissing)
			}
		}
		for _, r := range have {
			if !slices.Contains(want, r) {
				report(r, proxier.DifferenceUnexpected)
			}
		}
	}
}

// classes are the classes of the plan, and others with chains that the engine may keep without users.
func (v *verification) classes() []class {
	for name := range v.have.chains {
		if c, ok := parseClass(name); ok {
			v.scratch.state.classes.adopt(c)
		}
	}
	return v.scratch.state.classes.sorted()
}

func (v *verification) verdicts() {
	wanted := wantedVerdicts(v.classes())
	for i := range setSpecs {
		spec := &setSpecs[i]
		if !spec.isVerdictMap() || !v.comparable[i] {
			continue
		}
		have := v.have.verdict[i]
		for class, want := range wanted[i] {
			v.compare(v.leadName(spec, class), want.String(), have[class].String())
		}
		for class, to := range have {
			if _, ok := wanted[i][class]; !ok {
				v.compare(v.leadName(spec, class), "", to.String())
			}
		}
	}
}

func (v *verification) leadName(spec *setSpec, class uint32) string {
	return v.elementName(spec, string(nativeUint32(class)), "")
}

func (v *verification) chains() error {
	known := map[string]bool{}
	wanted := v.layout.chains()
	for _, c := range v.classes() {
		wanted = append(wanted, v.layout.classChain(c))
	}
	for _, c := range wanted {
		known[c.name] = true
		if err := v.chain(&c); err != nil {
			return err
		}
	}
	for name, c := range v.have.chains {
		if !known[name] {
			v.compare("chain "+name+v.where, "", c.String()+fmt.Sprintf(" with %d rules", len(c.bodies)))
		}
	}
	return nil
}

func (v *verification) chain(want *chainSpec) error {
	object := "chain " + want.name + v.where
	have := v.have.chains[want.name]
	if have == nil {
		v.compare(object, want.kind(), "")
		return nil
	}
	v.compare(object, want.kind(), have.String())
	wanted := make([]wantedRule, len(want.rules))
	for i, r := range want.rules {
		exprs, _, err := r.encode(v.layout.family())
		if err != nil {
			return err
		}
		wanted[i] = wantedRule{meaning: meaningOfAll(exprs), text: ruleText(v.layout.family(), exprs)}
	}
	v.rules(object, wanted, have.bodies)
	return nil
}

type wantedRule struct{ meaning, text string }

// rules compares the rules of a chain. Those at both ends that are equal are not numbered
// anew by one that is missing or unexpected between them.
func (v *verification) rules(chain string, want []wantedRule, have []string) {
	equal := func(w wantedRule, body string) bool { return w.meaning == meaningOf([]byte(body)) }
	n := 1
	for len(want) > 0 && len(have) > 0 && equal(want[0], have[0]) {
		want, have, n = want[1:], have[1:], n+1
		v.report.Checked++
	}
	for len(want) > 0 && len(have) > 0 && equal(want[len(want)-1], have[len(have)-1]) {
		want, have = want[:len(want)-1], have[:len(have)-1]
		v.report.Checked++
	}
	for i := range max(len(want), len(have)) {
		var wanted, had string
		if i < len(want) {
			wanted = want[i].text
		}
		if i < len(have) {
			had = namesOf([]byte(have[i]))
		}
		if i < len(want) && i < len(have) && equal(want[i], have[i]) {
			had = wanted
		}
		v.compare(fmt.Sprintf("rule %d of %s", n+i, chain), wanted, had)
	}
}

// kind is the chain's type, hook, priority and version.
func (c *chainSpec) kind() string {
	if c.hook == nil {
		return "regular"
	}
	return (&observedChain{isBase: true, typ: c.hook.kind, hook: c.hook.number, priority: c.hook.priority, policy: acceptPolicy, comment: layoutVersion}).String()
}

// String is comparable with chainSpec.kind.
func (c *observedChain) String() string {
	if !c.isBase {
		return "regular"
	}
	return strings.TrimSpace(fmt.Sprintf("type %s hook %d priority %d policy %s %s", c.typ, c.hook, c.priority, either(c.policy == acceptPolicy, "accept", "drop"), c.comment))
}
