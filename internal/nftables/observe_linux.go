package nftables

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// observation is the content of our table in the kernel.
type observation struct {
	comment string
	dormant bool
	sets    map[string]observedSet
	chains  map[string]*observedChain  // by name
	verdict [numSets]map[uint32]lead   // class to chain
	ranges  [numSets][]addrRange       // of the interval sets
	element [numSets]map[string]string // key, and its end, to data
	catches []setID                    // sets with a catch-all element
	flows   map[string]flowtable       // by name
	// known is what the engine has written; nil if it does not know. second is another socket to read with, if it is not nil.
	known  map[changetracker.ServicePortName]*placed
	second kernel
	// whole means that the elements have been read.
	whole bool
}

// lead is the data of an element of a verdict map.
type lead struct {
	chain string
	jumps bool // and comes back
}

// String prints it as nft does; the zero lead is "".
func (l lead) String() string {
	if l.chain == "" {
		return ""
	}
	return either(l.jumps, "jump ", "goto ") + l.chain
}

type observedSet struct {
	shape     string
	anonymous bool // it belongs to a rule
	count     int  // of elements, if counted
	counted   bool // newer kernels tell
}

type observedChain struct {
	hook     uint32
	priority int32
	isBase   bool
	comment  string
	typ      string   // of a base chain
	policy   uint32   // of a base chain
	rules    []string // checksums
	bodies   []string // the expressions of each rule
}

// observe reads the table; nil means that it does not exist.
func (e *Engine) observe(ctx context.Context) (*observation, error) {
	o, err := e.observeTable(ctx)
	for attempt := 1; attempt < moduleAttempts && errors.Is(err, unix.EINVAL); attempt++ {
		select {
		case <-time.After(modulePause):
			o, err = e.observeTable(ctx)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if err != nil || o == nil {
		return nil, err
	}
	if err := e.observeChains(ctx, o); err != nil {
		return nil, err
	}
	if o.sets, err = e.listSets(ctx); err != nil {
		return nil, err
	}
	if o.flows, err = e.listFlowtables(ctx, e.kernel); err != nil {
		return nil, err
	}
	return o, e.observeCatchAlls(ctx, o)
}

// observeCatchAlls finds catch-all elements, which only others add: they match what no other
// element of the set does. The kernel does not count them, and those before 5.13 have none.
func (e *Engine) observeCatchAlls(ctx context.Context, o *observation) error {
	w := newWire(e.batch.Family, e.batch.Table)
	var of []setID
	for i := range setSpecs {
		if _, exists := o.sets[setSpecs[i].name]; exists {
			w.CatchAll(nft.GetElements(), setSpecs[i].name)
			of = append(of, setSpecs[i].id)
		}
	}
	if len(of) == 0 {
		return nil
	}
	err := e.kernel.Query(ctx, &w.Batch, func(message int, _ []byte) { o.catches = append(o.catches, of[message]) })
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

func (e *Engine) listSets(ctx context.Context) (sets map[string]observedSet, err error) {
	reset := func() { sets = map[string]observedSet{} }
	err = e.list(ctx, unix.NFT_MSG_GETSET, "sets", reset, func(attrs []byte) {
		if netlinkx.String(netlinkx.Find(attrs, unix.NFTA_SET_TABLE)) != e.config.Names.Table {
			return
		}
		count := netlinkx.Find(attrs, nft.SetCount)
		sets[netlinkx.String(netlinkx.Find(attrs, unix.NFTA_SET_NAME))] = observedSet{
			shape:     shapeOf(attrs),
			anonymous: netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_SET_FLAGS))&unix.NFT_SET_ANONYMOUS != 0,
			count:     int(netlinkx.Uint32(count)),
			counted:   count != nil,
		}
	})
	return sets, err
}

// While the kernel loads nf_tables for another socket, such as that of the other family, it
// rejects messages as invalid.
const (
	moduleAttempts = 8
	modulePause    = 50 * time.Millisecond
)

func (e *Engine) observeTable(ctx context.Context) (o *observation, err error) {
	err = e.list(ctx, unix.NFT_MSG_GETTABLE, "tables", func() { o = nil }, func(attrs []byte) {
		if netlinkx.String(netlinkx.Find(attrs, unix.NFTA_TABLE_NAME)) == e.config.Names.Table {
			o = &observation{
				comment: comment(netlinkx.Find(attrs, nft.TableUserdata)),
				dormant: netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_TABLE_FLAGS))&unix.NFT_TABLE_F_DORMANT != 0,
			}
		}
	})
	return o, err
}

func (e *Engine) observeChains(ctx context.Context, o *observation) error {
	err := e.list(ctx, unix.NFT_MSG_GETCHAIN, "chains", func() { o.chains = map[string]*observedChain{} }, func(attrs []byte) {
		if netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_TABLE)) == e.config.Names.Table {
			o.chains[netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_NAME))] = parseChain(attrs)
		}
	})
	if err != nil {
		return err
	}
	forget := func() {
		for _, c := range o.chains {
			c.rules, c.bodies = nil, nil
		}
	}
	return e.list(ctx, unix.NFT_MSG_GETRULE, "rules", forget, func(attrs []byte) {
		c := o.chains[netlinkx.String(netlinkx.Find(attrs, unix.NFTA_RULE_CHAIN))]
		if c != nil && netlinkx.String(netlinkx.Find(attrs, unix.NFTA_RULE_TABLE)) == e.config.Names.Table {
			c.rules = append(c.rules, string(netlinkx.Find(attrs, unix.NFTA_RULE_USERDATA)))
			c.bodies = append(c.bodies, string(netlinkx.Find(attrs, unix.NFTA_RULE_EXPRESSIONS)))
		}
	})
}

func parseChain(attrs []byte) *observedChain {
	c := &observedChain{comment: comment(netlinkx.Find(attrs, nft.ChainUserdata))}
	if h := netlinkx.Find(attrs, unix.NFTA_CHAIN_HOOK); h != nil {
		c.isBase = true
		c.typ, c.policy = netlinkx.String(netlinkx.Find(attrs, unix.NFTA_CHAIN_TYPE)), netlinkx.Uint32(netlinkx.Find(attrs, unix.NFTA_CHAIN_POLICY))
		c.hook = netlinkx.Uint32(netlinkx.Find(h, unix.NFTA_HOOK_HOOKNUM))
		c.priority = int32(netlinkx.Uint32(netlinkx.Find(h, unix.NFTA_HOOK_PRIORITY)))
	}
	return c
}

// comment returns the comment in the user data of a table or a chain.
func comment(user []byte) string { return netlinkx.String(nft.FindUserdata(user, nft.UserdataComment)) }

// shapeOf describes a set in the kernel, as shape does for the wanted set.
func shapeOf(attrs []byte) string {
	var b []byte
	for _, typ := range []uint16{unix.NFTA_SET_FLAGS, unix.NFTA_SET_KEY_TYPE, unix.NFTA_SET_KEY_LEN, unix.NFTA_SET_DATA_TYPE, unix.NFTA_SET_DATA_LEN} {
		b = binary.BigEndian.AppendUint32(b, netlinkx.Uint32(netlinkx.Find(attrs, typ)))
	}
	return hex.EncodeToString(b)
}

func (s *setSpec) shape(addrLen int) string {
	b := binary.BigEndian.AppendUint32(nil, s.flags())
	b = binary.BigEndian.AppendUint32(b, nft.DataType(s.key, addrLen))
	b = binary.BigEndian.AppendUint32(b, uint32(nft.Padded(s.key, addrLen)))
	b = binary.BigEndian.AppendUint32(b, nft.DataType(s.data, addrLen))
	return hex.EncodeToString(binary.BigEndian.AppendUint32(b, uint32(nft.Padded(s.data, addrLen))))
}

// list dumps objects of our family.
func (e *Engine) list(ctx context.Context, typ uint16, object string, reset func(), each func(attrs []byte)) error {
	w := newWire(e.batch.Family, e.batch.Table)
	w.Start(typ, unix.NLM_F_DUMP, "list", object)
	w.End()
	return e.kernel.Dump(ctx, &w.Batch, reset, each)
}

// isOurs reports whether the table is ours, of any version, so that it can be repaired in
// use: sets with our names hold what the names mean.
func (o *observation) isOurs(l *layout) bool {
	if o.comment != tableComment {
		return false
	}
	addrLen := l.addrLen()
	for i := range setSpecs {
		s := &setSpecs[i]
		if set, ok := o.sets[s.name]; ok && set.shape != s.shape(addrLen) {
			return false
		}
	}
	for chain := range o.chains {
		for name, shape := range limitShapes(chain, addrLen) {
			if set, ok := o.sets[name]; ok && set.shape != shape {
				return false
			}
		}
	}
	flows, ok := o.flows[flowtableOfOurs]
	return !ok || l.rules.fastAfter == 0 || flows.shape() == wantedFlowtable().shape()
}

// classChains returns the chains of the classes that are in the kernel.
func (o *observation) classChains(l *layout) []chainSpec {
	var specs []chainSpec
	for name := range o.chains {
		if c, ok := parseClass(name); ok {
			specs = append(specs, l.classChain(c))
		}
	}
	return specs
}

func (o *observation) hasChain(want *chainSpec, l *layout) (bool, error) {
	have := o.chains[want.name]
	if have == nil || have.String() != want.kind() {
		return false, nil
	}
	sums, err := want.checksums(l.family())
	return slices.Equal(have.rules, sums), err
}

// checksums returns the user data of the wanted rules of a chain.
func (c *chainSpec) checksums(family uint8) ([]string, error) {
	sums := make([]string, len(c.rules))
	for i := range c.rules {
		_, sum, err := c.rules[i].encode(family)
		if err != nil {
			return nil, err
		}
		sums[i] = string(nft.Userdata(udataChecksum, sum))
	}
	return sums, nil
}

// observeVerdicts reads the verdict maps.
func (e *Engine) observeVerdicts(ctx context.Context, o *observation) error {
	if o.whole {
		return nil
	}
	return e.observeSets(ctx, o, (*setSpec).isVerdictMap)
}

// observeElements reads all other sets, except those that packets write.
func (e *Engine) observeElements(ctx context.Context, o *observation) error {
	return e.observeSets(ctx, o, func(s *setSpec) bool { return !e.packetsWrite(s) && !s.isVerdictMap() })
}

// packetsWrite reports whether packets add elements to the set.
func (e *Engine) packetsWrite(s *setSpec) bool {
	return s.id == setAffinity || e.counting() && slices.Contains(counterSets(), s.id)
}

// observeSets reads the sets for which among is true.
func (e *Engine) observeSets(ctx context.Context, o *observation, among func(*setSpec) bool) error {
	for i := range setSpecs {
		spec := &setSpecs[i]
		if _, there := o.sets[spec.name]; !there || !among(spec) {
			continue
		}
		var err error
		switch {
		case spec.isVerdictMap():
			reset := func() { o.verdict[spec.id] = map[uint32]lead{} }
			err = e.listElements(ctx, spec, reset, func(el nft.Element) {
				chain, jumps := el.Chain()
				o.verdict[spec.id][binary.NativeEndian.Uint32(el.Key)] = lead{chain, jumps}
			})
		case slices.Contains(intervalSets(), spec.id):
			var elements []nft.Element
			err = e.listElements(ctx, spec, func() { elements = nil }, func(el nft.Element) {
				el.Key = slices.Clone(el.Key)
				elements = append(elements, el)
			})
			o.ranges[spec.id] = rangesOf(elements)
		default:
			err = e.observeSet(ctx, o, spec)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// While the kernel resizes a hash table, for a while after many additions, a dump has elements
// twice, and may lack as many others.
const (
	resizeAttempts = 6
	resizePause    = 5 * time.Millisecond // doubled each time
)

// observeSet reads a set until no element comes twice, and it has as many as the kernel counts
// (newer kernels do), at most a few times.
func (e *Engine) observeSet(ctx context.Context, o *observation, spec *setSpec) error {
	for _, read := range []func(context.Context, *observation, *setSpec) (bool, error){e.claimSet, e.askSet} {
		if all, err := read(ctx, o, spec); all || err != nil {
			return err
		}
	}
	set, listed := o.sets[spec.name], 0
	reset := func() { o.element[spec.id], listed = make(map[string]string, set.count), 0 }
	pause := resizePause
	for range resizeAttempts {
		err := e.listElements(ctx, spec, reset, func(el nft.Element) {
			key, data := el.Strings()
			o.element[spec.id][key] = data
			listed++
		})
		found := len(o.element[spec.id])
		if err != nil || spec.flags()&unix.NFT_SET_INTERVAL != 0 || found == listed && (!set.counted || found == set.count) {
			return err
		}
		select {
		case <-time.After(pause):
			pause *= 2
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (e *Engine) listElements(ctx context.Context, spec *setSpec, reset func(), each func(nft.Element)) error {
	return e.listElementsOf(ctx, e.kernel, spec, reset, each)
}

// listElementsOf uses another socket.
func (e *Engine) listElementsOf(ctx context.Context, k kernel, spec *setSpec, reset func(), each func(nft.Element)) error {
	w := newWire(e.batch.Family, e.batch.Table)
	w.Start(unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP, "list", "elements of set "+spec.name)
	w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, w.Table)
	w.Text(unix.NFTA_SET_ELEM_LIST_SET, spec.name)
	w.End()
	return k.Dump(ctx, &w.Batch, reset, func(attrs []byte) {
		for el := range nft.ElementsOf(attrs) {
			each(el)
		}
	})
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
	_, l.rules.limits = o.sets[setName(setLimits)]
	v := view{layout: &l, table: e.config.Names.Table, chains: append(l.chains(), o.classChains(&l)...), verdicts: map[setID][]string{}}
	for _, name := range slices.Sorted(maps.Keys(o.flows)) {
		v.flows = append(v.flows, o.flows[name])
	}
	encoded := map[setID][]byte{}
	for i := range setSpecs {
		spec := &setSpecs[i]
		if _, there := o.sets[spec.name]; !there {
			continue
		}
		reset := func() { encoded[spec.id], v.verdicts[spec.id] = nil, nil }
		err := e.listElements(ctx, spec, reset, func(el nft.Element) {
			if chain, _ := el.Chain(); chain != "" {
				v.lead(binary.NativeEndian.Uint32(el.Key), chain, []setID{spec.id})
				return
			}
			encoded[spec.id] = nft.AppendElement(encoded[spec.id], el.Key, el.KeyEnd, el.Data)
		})
		if err != nil {
			return err
		}
	}
	v.elements = func(s *setSpec) []string { return elementTexts(s, v.addrLen(), encoded[s.id]) }
	return v.print(w)
}
