package packettrace

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// set is a set or a map.
type set struct {
	anonymous bool
	keySize   int
	verdicts  bool // it is a map of verdicts
	interval  bool
	elements  func() []element // reads them
}

// element is one of a set: a value, or a range if end is set.
type element struct {
	first, end []byte
	verdict    string
}

const (
	nftSetAnonymous, nftSetInterval, nftSetMap = 0x1, 0x4, 0x8
	nftVerdictType                             = 0xffffff00 // NFT_DATA_VERDICT
	nftaSetElemKeyEnd                          = 10
)

// readSet reads what a set is; nil if it is gone.
func (s *session) readSet(family byte, table, name string) *set {
	answers, err := s.owner.Execute(request(unix.NFT_MSG_GETSET, family, 0, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_SET_TABLE, table)
		ae.String(unix.NFTA_SET_NAME, name)
	}))
	if err != nil || len(answers) == 0 || len(answers[0].Data) < nfgenLen {
		return nil
	}
	a := attributesOf(answers[0].Data[nfgenLen:])
	flags := a.u32(unix.NFTA_SET_FLAGS)
	return &set{
		anonymous: flags&nftSetAnonymous != 0, interval: flags&nftSetInterval != 0,
		keySize:  int(a.u32(unix.NFTA_SET_KEY_LEN)),
		verdicts: flags&nftSetMap != 0 && a.u32(unix.NFTA_SET_DATA_TYPE) == nftVerdictType,
		elements: func() []element { return s.elements(family, table, name) },
	}
}

// elements reads those of a set.
func (s *session) elements(family byte, table, name string) (list []element) {
	const flagEnd = 1 // NFT_SET_ELEM_INTERVAL_END: the element is the first value after a range
	answers, err := s.owner.Execute(request(unix.NFT_MSG_GETSETELEM, family, netlink.Dump, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		ae.String(unix.NFTA_SET_ELEM_LIST_SET, name)
	}))
	if err != nil {
		return nil
	}
	var ends [][]byte
	for _, m := range answers {
		if len(m.Data) < nfgenLen {
			continue
		}
		for _, encoded := range netlinkx.Attributes(netlinkx.Find(m.Data[nfgenLen:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			a := attributesOf(encoded)
			if a.u32(unix.NFTA_SET_ELEM_FLAGS)&flagEnd != 0 {
				ends = append(ends, a.data(unix.NFTA_SET_ELEM_KEY))
				continue
			}
			v := attributesOf(netlinkx.Find(a[unix.NFTA_SET_ELEM_DATA], unix.NFTA_DATA_VERDICT))
			e := element{first: a.data(unix.NFTA_SET_ELEM_KEY), end: a.data(nftaSetElemKeyEnd)}
			if v[verdictCode] != nil {
				e.verdict = verdictText(v.u32(verdictCode), v.text(verdictChain))
			}
			list = append(list, e)
		}
	}
	closeRanges(list, ends)
	return list
}

// closeRanges sets the ends of ranges that the kernel has as separate elements.
func closeRanges(list []element, ends [][]byte) {
	slices.SortFunc(list, func(a, b element) int { return bytes.Compare(a.first, b.first) })
	slices.SortFunc(ends, bytes.Compare)
	for i := range list {
		next, _ := slices.BinarySearchFunc(ends, list[i].first, func(end, first []byte) int {
			if c := bytes.Compare(end, first); c != 0 {
				return c
			}
			return -1 // the end of the range before
		})
		if next < len(ends) {
			list[i].end = before(ends[next])
		} else if len(ends) > 0 { // the range up to the greatest value has no end
			list[i].end = bytes.Repeat([]byte{0xff}, len(list[i].first))
		}
	}
}

// before returns the value before b, which is a number in network byte order.
func before(b []byte) []byte {
	b = slices.Clone(b)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i]--; b[i] != 0xff {
			break
		}
	}
	return b
}

// lookup prints the search for a register in a set or a map.
func (p *printer) lookup(a attributes) {
	register, name := a.u32(unix.NFTA_LOOKUP_SREG), a.text(unix.NFTA_LOOKUP_SET)
	s := p.set(name)
	keys := p.keys(register, s)
	text := p.textOf(keys)
	members := "@" + name
	if s == nil {
		p.unknown = true
	} else if s.anonymous {
		members = p.members(s, keys)
	}
	not := ""
	if a.u32(unix.NFTA_LOOKUP_FLAGS)&1 != 0 { // NFT_LOOKUP_F_INV
		not = "!= "
	}
	to, maps := a[unix.NFTA_LOOKUP_DREG]
	switch {
	case !maps:
		p.add("%s %s%s", text, not, members)
	case netlinkx.Uint32(to) == unix.NFT_REG_VERDICT:
		p.add("%s vmap %s", text, members)
	default:
		p.unknown = p.unknown || s != nil && s.anonymous // of the values nothing is known
		p.put(netlinkx.Uint32(to), &value{text: text + " map " + members, kind: numbers})
	}
}

// keys returns the values of which the key of a set consists.
func (p *printer) keys(register uint32, s *set) (list []*value) {
	for at, size := key(register), 0; ; {
		v := p.get(at)
		list = append(list, v)
		words := max(1, (v.size+3)/4)
		if size += 4 * words; s == nil || size >= s.keySize || len(list) > unix.NFT_REG32_COUNT {
			return list
		}
		at += uint32(words)
	}
}

func (p *printer) textOf(keys []*value) string {
	texts := make([]string, len(keys))
	for i, v := range keys {
		texts[i] = v.whole(p)
	}
	return strings.Join(texts, " . ")
}

// members prints the elements of a set that has no name of its own.
func (p *printer) members(s *set, keys []*value) string {
	elements := s.elements()
	if len(keys) == 1 && keys[0].kind.host {
		slices.SortStableFunc(elements, func(a, b element) int { return bytes.Compare(reversed(a.first), reversed(b.first)) })
	}
	list := make([]string, len(elements))
	for i, e := range elements {
		if list[i] = p.member(&e, keys); s.verdicts {
			list[i] += " : " + e.verdict
		}
	}
	if len(list) == 0 {
		p.unknown = true
	}
	return "{ " + strings.Join(list, ", ") + " }"
}

// member prints one element.
func (p *printer) member(e *element, keys []*value) string {
	var texts []string
	first, end := e.first, e.end
	for _, v := range keys {
		size := min(cmp.Or(v.size, len(first)), len(first))
		text := v.print(p, first[:size])
		if len(end) >= size && !bytes.Equal(first[:size], end[:size]) {
			text = p.rangeText(v, first[:size], end[:size])
		}
		texts = append(texts, text)
		step := min((size+3)&^3, len(first))
		first, end = first[step:], end[min(step, len(end)):]
	}
	return strings.Join(texts, " . ")
}

// rangeText prints a range, as a prefix if it is one of a kind that has prefixes.
func (p *printer) rangeText(v *value, from, to []byte) string {
	if a, ok := netip.AddrFromSlice(from); ok && v.kind.prefix {
		differs := make([]byte, len(from))
		for i := range from {
			differs[i] = ^(from[i] ^ to[i])
		}
		prefix := netip.PrefixFrom(a, ones(differs))
		if isPrefix(from, to, prefix.Bits()) {
			return prefix.String()
		}
	}
	if v.kind == devices { // names that begin alike
		p.unknown = true
	}
	return fmt.Sprintf("%s-%s", v.print(p, from), v.print(p, to))
}

// isPrefix reports whether all bits after the first ones are 0 in from and 1 in to.
func isPrefix(from, to []byte, bits int) bool {
	for i := bits; i < len(from)*8; i++ {
		if bit := byte(0x80) >> (i % 8); from[i/8]&bit != 0 || to[i/8]&bit == 0 {
			return false
		}
	}
	return true
}
