package nftext

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// Set is a set or a map.
type Set struct {
	Anonymous bool
	KeySize   int  // in bytes, with padding
	Verdicts  bool // it is a map of verdicts
	// Elements reads the elements of an anonymous set.
	Elements func() []Element
}

// Element is one of a set: a value, or a range if End is set.
type Element struct {
	First, End []byte
	Verdict    string
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
	} else if s.Anonymous {
		members = p.members(s, keys)
	}
	not := ""
	if a.u32(unix.NFTA_LOOKUP_FLAGS)&1 != 0 { // NFT_LOOKUP_F_INV
		not = "!= "
	}
	to := a.get(unix.NFTA_LOOKUP_DREG)
	switch {
	case to == nil:
		p.add("%s %s%s", text, not, members)
	case netlinkx.Uint32(to) == unix.NFT_REG_VERDICT:
		p.add("%s vmap %s", text, members)
	default:
		p.unknown = p.unknown || s != nil && s.Anonymous // of the values nothing is known
		p.put(netlinkx.Uint32(to), &value{text: text + " map " + members, kind: numbers})
	}
}

// keys returns the values of which the key of a set consists.
func (p *printer) keys(register uint32, s *Set) (list []*value) {
	for at, size := key(register), 0; ; {
		v := p.at(at)
		list = append(list, v)
		words := max(1, (v.size+3)/4)
		if size += 4 * words; s == nil || size >= s.KeySize || len(list) > unix.NFT_REG32_COUNT {
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
func (p *printer) members(s *Set, keys []*value) string {
	elements := s.Elements()
	if len(keys) == 1 && keys[0].kind.host {
		slices.SortStableFunc(elements, func(a, b Element) int { return bytes.Compare(reversed(a.First), reversed(b.First)) })
	}
	list := make([]string, len(elements))
	for i, e := range elements {
		if list[i] = p.member(&e, keys); s.Verdicts {
			list[i] += " : " + e.Verdict
		}
	}
	if len(list) == 0 {
		p.unknown = true
	}
	return "{ " + strings.Join(list, ", ") + " }"
}

// member prints one element.
func (p *printer) member(e *Element, keys []*value) string {
	var texts []string
	first, end := e.First, e.End
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
