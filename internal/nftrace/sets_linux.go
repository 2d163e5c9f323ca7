package nftrace

import (
	"bytes"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/nftext"
)

// readSet reads what a set is; nil if it is gone.
func (s *session) readSet(family byte, table, name string) *nftext.Set {
	answers := s.ask(family, table, func(b *nft.Batch) { b.GetSet(name) })
	if len(answers) == 0 {
		return nil
	}
	number := func(typ uint16) uint32 { return netlinkx.Uint32(netlinkx.Find(answers[0], typ)) }
	flags := number(unix.NFTA_SET_FLAGS)
	return &nftext.Set{
		Anonymous: flags&unix.NFT_SET_ANONYMOUS != 0, KeySize: int(number(unix.NFTA_SET_KEY_LEN)),
		Verdicts: flags&unix.NFT_SET_MAP != 0 && number(unix.NFTA_SET_DATA_TYPE) == unix.NFT_DATA_VERDICT,
		Elements: func() []nftext.Element { return s.elements(family, table, name) },
	}
}

// elements reads the elements of a set.
func (s *session) elements(family byte, table, name string) (list []nftext.Element) {
	var ends [][]byte
	for _, attrs := range s.ask(family, table, func(b *nft.Batch) { b.ListElements(name) }) {
		for e := range nft.ElementsOf(attrs) {
			if e.End {
				ends = append(ends, e.Key)
				continue
			}
			list = append(list, nftext.Element{First: e.Key, End: e.KeyEnd, Verdict: nftext.VerdictOf(e.Verdict)})
		}
	}
	closeRanges(list, ends)
	return list
}

// closeRanges sets the ends of ranges that the kernel has as separate elements.
func closeRanges(list []nftext.Element, ends [][]byte) {
	slices.SortFunc(list, func(a, b nftext.Element) int { return bytes.Compare(a.First, b.First) })
	slices.SortFunc(ends, bytes.Compare)
	for i := range list {
		next, _ := slices.BinarySearchFunc(ends, list[i].First, func(end, first []byte) int {
			if c := bytes.Compare(end, first); c != 0 {
				return c
			}
			return -1 // the end of the range before
		})
		if next < len(ends) {
			list[i].End = before(ends[next])
		} else if len(ends) > 0 { // the range up to the greatest value has no end
			list[i].End = bytes.Repeat([]byte{0xff}, len(list[i].First))
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
