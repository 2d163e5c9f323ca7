package allpackets

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// nfTable is a table as the kernel dumps it. Its packets may write to sets: writes holds
// that, for one packet.
type nfTable struct {
	chains map[string][]*nftables.Rule
	base   map[nftables.ChainHook][]*nftables.Chain
	sets   map[string]*nfSet
	writes map[string][]byte
}

type nfSet struct {
	keyLen    int
	exact     map[string]nftables.SetElement
	intervals []nftables.SetElement // sorted, if the set has no concatenation
	fields    []int                 // lengths of a concatenation with intervals
}

func readTable(netNS int, family nftables.TableFamily, name string) (*nfTable, error) {
	conn, err := nftables.New(nftables.WithNetNSFd(netNS), nftables.AsLasting())
	if err != nil {
		return nil, err
	}
	defer conn.CloseLasting()
	t := &nfTable{chains: map[string][]*nftables.Rule{}, base: map[nftables.ChainHook][]*nftables.Chain{}, sets: map[string]*nfSet{}}
	table := &nftables.Table{Name: name, Family: family}
	chains, err := conn.ListChainsOfTableFamily(family)
	if err != nil {
		return nil, err
	}
	for _, c := range chains {
		if c.Table.Name != name {
			continue
		}
		if t.chains[c.Name], err = conn.GetRules(table, c); err != nil {
			return nil, err
		}
		if c.Hooknum != nil {
			t.base[*c.Hooknum] = append(t.base[*c.Hooknum], c)
		}
	}
	sets, err := conn.GetSets(table)
	if err != nil {
		return nil, err
	}
	for _, s := range sets {
		elements, err := conn.GetSetElements(s)
		if err != nil {
			return nil, err
		}
		t.sets[s.Name] = newSet(s, elements)
	}
	return t, nil
}

func newSet(s *nftables.Set, elements []nftables.SetElement) *nfSet {
	set := &nfSet{exact: map[string]nftables.SetElement{}}
	for _, e := range elements {
		set.keyLen = len(e.Key)
		if s.Interval {
			set.intervals = append(set.intervals, e)
		} else {
			set.exact[string(e.Key)] = e
		}
	}
	if s.Interval && s.Concatenation { // address, protocol, port, address
		n := (set.keyLen - 8) / 2
		set.fields = []int{n, 4, 4, n}
	}
	if s.Name == "affinity" { // number, address
		set.keyLen = 8
		if s.Table.Family == nftables.TableFamilyIPv6 {
			set.keyLen = 20
		}
	}
	slices.SortFunc(set.intervals, func(a, b nftables.SetElement) int { return bytes.Compare(a.Key, b.Key) })
	return set
}

func (s *nfSet) find(key []byte) (e nftables.SetElement, ok bool) {
	switch {
	case s.fields != nil:
		i := slices.IndexFunc(s.intervals, func(e nftables.SetElement) bool { return s.isWithin(key, e) })
		return e, i >= 0
	case s.intervals != nil:
		for _, i := range s.intervals {
			if bytes.Compare(i.Key, key) > 0 {
				break
			}
			ok = !i.IntervalEnd
		}
		return e, ok
	}
	e, ok = s.exact[string(key)]
	return e, ok
}

// isWithin compares the fields of a concatenation one by one.
func (s *nfSet) isWithin(key []byte, e nftables.SetElement) bool {
	from := 0
	for _, n := range s.fields {
		field := key[from : from+n]
		if bytes.Compare(field, e.Key[from:from+n]) < 0 || bytes.Compare(field, e.KeyEnd[from:from+n]) > 0 {
			return false
		}
		from += n
	}
	return true
}

// walk implements ruleset.
func (t *nfTable) walk(p *packet, dice func(int) int) error {
	t.writes = map[string][]byte{}
	first := nftables.ChainHookPrerouting
	if p.fromNode {
		first = nftables.ChainHookOutput
	}
	for _, hook := range []*nftables.ChainHook{first, nftables.ChainHookPostrouting} {
		for _, chain := range t.base[*hook] {
			r := nfRun{nfTable: t, packet: p, dice: dice}
			if err := r.chain(chain.Name); err != nil {
				return err
			}
			if p.verdict != "" {
				return nil
			}
		}
	}
	return nil
}

// nfRun is a packet in a base chain. The first 64 bytes of registers are those of rules.
type nfRun struct {
	*nfTable
	*packet

	dice      func(int) int
	registers [64]byte
	done      bool // with the base chain
	to        *expr.Verdict
	missed    bool // the rule does not match
}

// chain runs a chain. After a goto, the caller's caller goes on.
func (r *nfRun) chain(name string) error {
	rules, ok := r.chains[name]
	if !ok {
		return fmt.Errorf("no chain %s", name)
	}
	for _, rule := range rules {
		if err := r.rule(rule.Exprs); err != nil {
			return fmt.Errorf("chain %s: %w", name, err)
		}
		to := r.to
		switch {
		case r.done:
			return nil
		case to == nil || to.Kind == expr.VerdictContinue:
			continue
		case to.Kind == expr.VerdictReturn:
			return nil
		}
		if err := r.chain(to.Chain); err != nil || r.done || to.Kind == expr.VerdictGoto {
			return err
		}
	}
	return nil
}

func (r *nfRun) rule(exprs []expr.Any) error {
	r.to, r.missed = nil, false
	for _, e := range exprs {
		if err := r.expression(e); err != nil {
			return err
		}
		if r.missed || r.done || r.to != nil {
			return nil
		}
	}
	return nil
}

// at returns n bytes from a register on. The kernel calls the registers of 16 bytes 1 to 4,
// and those of 4 bytes 8 and up.
func (r *nfRun) at(register uint32, n int) []byte {
	from := 4 * (int(register) - 8)
	if register < 8 {
		from = 16 * (int(register) - 1)
	}
	return r.registers[from : from+n]
}

func (r *nfRun) load(register uint32, data []byte) {
	whole := r.at(register, (len(data)+3)&^3)
	clear(whole)
	copy(whole, data)
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

func (r *nfRun) number(register uint32) uint32 { return binary.NativeEndian.Uint32(r.at(register, 4)) }

func (r *nfRun) expression(e expr.Any) error {
	switch e := e.(type) {
	case *expr.Payload:
		network, transport := r.headers()
		from := network
		if e.Base == expr.PayloadBaseTransportHeader {
			from = transport
		}
		r.load(e.DestRegister, from[e.Offset:e.Offset+e.Len])
	case *expr.Immediate:
		r.load(e.Register, e.Data)
	case *expr.Cmp:
		equal := bytes.Equal(r.at(e.Register, len(e.Data)), e.Data)
		r.missed = equal != (e.Op == expr.CmpOpEq)
	case *expr.Bitwise:
		data := slices.Clone(r.at(e.SourceRegister, int(e.Len)))
		for i := range data {
			data[i] = data[i]&e.Mask[i] ^ e.Xor[i]
		}
		r.load(e.DestRegister, data)
	case *expr.Numgen:
		r.load(e.Register, native(uint32(r.dice(int(e.Modulus)))+e.Offset))
	case *expr.Counter:
	case *expr.Ct:
		status := uint32(0)
		if r.translated {
			status = 0x20 // IPS_DST_NAT
		}
		r.load(e.Register, native(status))
	case *expr.Fib:
		r.fib(e)
	case *expr.Meta:
		return r.meta(e)
	case *expr.Lookup:
		return r.lookup(e)
	case *expr.Dynset:
		r.dynset(e)
	default:
		return r.end(e)
	}
	return nil
}

// end is for expressions that may end the way through a chain.
func (r *nfRun) end(e expr.Any) error {
	switch e := e.(type) {
	case *expr.Verdict:
		return r.decide(e)
	case *expr.Reject:
		r.done, r.verdict = true, "reject"
	case *expr.Masq:
		r.done, r.masq = true, true
	case *expr.NAT:
		n := r.dest.Addr().BitLen() / 8
		addr, _ := netip.AddrFromSlice(r.at(e.RegAddrMin, n))
		r.done, r.translated = true, true
		r.dest = netip.AddrPortFrom(addr, binary.BigEndian.Uint16(r.at(e.RegProtoMin, 2)))
	default:
		return fmt.Errorf("expression %T is unknown", e)
	}
	return nil
}

func (r *nfRun) decide(v *expr.Verdict) error {
	switch v.Kind {
	case expr.VerdictDrop:
		r.done, r.verdict = true, "drop"
	case expr.VerdictAccept:
		r.done = true
	case expr.VerdictJump, expr.VerdictGoto, expr.VerdictReturn, expr.VerdictContinue:
		r.to = v
	default:
		return fmt.Errorf("verdict %d is unknown", v.Kind)
	}
	return nil
}

func (r *nfRun) fib(e *expr.Fib) {
	addr, kind := r.dest.Addr(), uint32(unix.RTN_UNICAST)
	if e.FlagSADDR {
		addr = r.source.Addr()
	}
	if r.isLocal(addr) || r.fromNode && e.FlagSADDR {
		kind = unix.RTN_LOCAL
	}
	r.load(e.Register, native(kind))
}

func (r *nfRun) meta(e *expr.Meta) error {
	field := map[expr.MetaKey]*uint32{expr.MetaKeyMARK: &r.mark, expr.MetaKeyPRIORITY: &r.priority}[e.Key]
	switch {
	case field != nil && e.SourceRegister:
		*field = r.number(e.Register)
	case field != nil:
		r.load(e.Register, native(*field))
	case e.Key == expr.MetaKeyL4PROTO:
		r.load(e.Register, []byte{byte(r.protocol), 0, 0, 0})
	default:
		return fmt.Errorf("meta key %d is unknown", e.Key)
	}
	return nil
}

func (r *nfRun) lookup(e *expr.Lookup) error {
	set, ok := r.sets[e.SetName]
	if !ok {
		return fmt.Errorf("no set %s", e.SetName)
	}
	key := r.at(e.SourceRegister, set.keyLen)
	element, found := set.find(key)
	if data, written := r.writes[e.SetName+string(key)]; written {
		element, found = nftables.SetElement{Val: data}, data != nil
	}
	r.missed = found == e.Invert
	switch {
	case r.missed || !e.IsDestRegSet:
		return nil
	case e.DestRegister == unix.NFT_REG_VERDICT:
		return r.decide(verdictOf(element.Val))
	}
	r.load(e.DestRegister, element.Val)
	return nil
}

// verdictOf decodes the two attributes of a verdict in a map: the number, and the chain.
func verdictOf(data []byte) *expr.Verdict {
	v := &expr.Verdict{Kind: expr.VerdictKind(int32(binary.BigEndian.Uint32(data[4:8])))}
	if len(data) > 12 {
		v.Chain = string(bytes.TrimRight(data[12:], "\x00"))
	}
	return v
}

// dynset: operations 0 and 1 add or update an element, operation 2 deletes it. Above a limit is no packet: each is the first one
// of its client.
func (r *nfRun) dynset(e *expr.Dynset) {
	if len(e.Exprs) > 0 {
		_, counts := e.Exprs[0].(*expr.Counter)
		r.missed = !counts
		return
	}
	set := r.sets[e.SetName]
	key := r.at(e.SrcRegKey, set.keyLen)
	_, found := set.find(key)
	data, written := r.writes[e.SetName+string(key)]
	found = found && !written || data != nil
	switch {
	case e.Operation == 2:
		r.writes[e.SetName+string(key)] = nil
	case !found:
		r.writes[e.SetName+string(key)] = slices.Clone(r.at(e.SrcRegData, 4))
	}
}
