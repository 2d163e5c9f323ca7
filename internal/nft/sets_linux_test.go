package nft

import (
	"bytes"
	"net/netip"
	"testing"

	library "github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// libraryElements returns the element list as the library encodes it.
func libraryElements(t *testing.T, elements ...library.SetElement) []byte {
	t.Helper()
	var list []byte
	conn, err := library.New(library.WithTestDial(func(requests []netlink.Message) ([]netlink.Message, error) {
		var acks []netlink.Message
		for _, m := range requests {
			if uint16(m.Header.Type)>>8 == unix.NFNL_SUBSYS_NFTABLES {
				list = bytes.Clone(netlinkx.Find(m.Data[4:], unix.NFTA_SET_ELEM_LIST_ELEMENTS))
			}
			if m.Header.Flags&netlink.Acknowledge != 0 {
				acks = append(acks, netlink.Message{Header: netlink.Header{Type: netlink.Error, Sequence: m.Header.Sequence}, Data: make([]byte, 4)})
			}
		}
		return acks, nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	set := &library.Set{Table: &library.Table{Name: "t", Family: library.TableFamilyIPv4}, Name: "s", ID: 1}
	if err = conn.SetAddElements(set, elements); err == nil {
		err = conn.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// FuzzElementsEncodeAsTheLibraryDoes compares our encoder of elements with that of
// github.com/google/nftables.
func FuzzElementsEncodeAsTheLibraryDoes(f *testing.F) {
	f.Add([]byte{10, 0, 0, 1}, []byte{}, []byte{1, 2, 3, 4})
	f.Add([]byte{10, 0, 0, 1, 6, 0, 0}, []byte{10, 0, 0, 2, 6, 0, 0}, []byte{})
	f.Fuzz(func(t *testing.T, key, keyEnd, data []byte) {
		key, keyEnd, data = clip(key), clip(keyEnd), clip(data)
		if len(key) == 0 {
			return
		}
		ours := AppendElement(nil, key, orNil(keyEnd), orNil(data))
		theirs := libraryElements(t, library.SetElement{Key: key, KeyEnd: keyEnd, Val: data})
		if !bytes.Equal(ours, theirs) {
			t.Errorf("key %x end %x data %x:\nours   %x\ntheirs %x", key, keyEnd, data, ours, theirs)
		}
		for _, item := range netlinkx.Attributes(ours) {
			e := ParseElement(item)
			if !bytes.Equal(e.Key, key) || !bytes.Equal(e.KeyEnd, keyEnd) || !bytes.Equal(e.Data, data) {
				t.Errorf("key %x end %x data %x came back as %+v", key, keyEnd, data, e)
			}
		}
	})
}

func clip(b []byte) []byte { return b[:min(len(b), 64)] }

func orNil(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return b
}

func TestVerdictElementsEncodeAsTheLibraryDoes(t *testing.T) {
	b := &Batch{Family: unix.NFPROTO_IPV4, Table: "t"}
	b.VerdictElement("classes", []byte{1, 2, 3, 4}, unix.NFT_GOTO, "rejected")
	var ours []byte
	for m := range netlinkx.Messages(b.Buf) {
		_, attrs := m.Netfilter()
		ours = netlinkx.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	}
	theirs := libraryElements(t, library.SetElement{
		Key: []byte{1, 2, 3, 4}, VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: "rejected"},
	})
	if !bytes.Equal(ours, theirs) {
		t.Errorf("ours   %x\ntheirs %x", ours, theirs)
	}
}

func TestIntervalEdgesEncodeAsTheLibraryDoes(t *testing.T) {
	addr := netip.MustParseAddr("10.0.0.0")
	for _, end := range []bool{false, true} {
		ours := ParseElement(netlinkx.Find(AppendIntervalEdge(nil, addr, end), unix.NFTA_LIST_ELEM))
		theirs := ParseElement(netlinkx.Find(libraryElements(t, library.SetElement{Key: addr.AsSlice(), IntervalEnd: end}), unix.NFTA_LIST_ELEM))
		if !bytes.Equal(ours.Key, theirs.Key) || ours.End != theirs.End || ours.End != end {
			t.Errorf("end %v: ours %+v, theirs %+v", end, ours, theirs)
		}
	}
}
