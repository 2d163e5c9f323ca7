package nftrace

import (
	"bytes"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nftext"
)

const (
	nftSetAnonymous, nftSetMap = 0x1, 0x8
	nftVerdictType             = 0xffffff00 // NFT_DATA_VERDICT
	nftaSetElemKeyEnd          = 10
)

// readSet reads what a set is; nil if it is gone.
func (s *session) readSet(family byte, table, name string) *nftext.Set {
	answers := s.ask(unix.NFT_MSG_GETSET, family, 0, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_SET_TABLE, table)
		ae.String(unix.NFTA_SET_NAME, name)
	})
	if len(answers) == 0 {
		return nil
	}
	number := func(typ uint16) uint32 { return netlinkx.Uint32(netlinkx.Find(answers[0], typ)) }
	flags := number(unix.NFTA_SET_FLAGS)
	return &nftext.Set{
		Anonymous: flags&nftSetAnonymous != 0, KeySize: int(number(unix.NFTA_SET_KEY_LEN)),
		Verdicts: flags&nftSetMap != 0 && number(unix.NFTA_SET_DATA_TYPE) == nftVerdictType,
		Elements: func() []nftext.Element { return s.elements(family, table, name) },
	}
}

// elements reads those of a set.
func (s *session) elements(family byte, table, name string) (list []nftext.Element) {
	const flagEnd = 1 // NFT_SET_ELEM_INTERVAL_END: the element is the first value after a range
	var ends [][]byte
	for _, attrs := range s.ask(unix.NFT_MSG_GETSETELEM, family, unix.NLM_F_DUMP, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		ae.String(unix.NFTA_SET_ELEM_LIST_SET, name)
	}) {
		for _, encoded := range netlinkx.Attributes(netlinkx.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			key := netlinkx.Find(encoded, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)
			if netlinkx.Uint32(netlinkx.Find(encoded, unix.NFTA_SET_ELEM_FLAGS))&flagEnd != 0 {
				ends = append(ends, key)
				continue
			}
			list = append(list, nftext.Element{
				First: key, End: netlinkx.Find(encoded, nftaSetElemKeyEnd, unix.NFTA_DATA_VALUE),
				Verdict: nftext.VerdictOf(netlinkx.Find(encoded, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VERDICT)),
			})
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
