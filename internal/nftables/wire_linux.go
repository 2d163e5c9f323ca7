package nftables

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// wire writes messages about the engine's table.
type wire struct{ nft.Batch }

func newWire(family uint8, table string) *wire {
	return &wire{nft.Batch{Family: family, Table: table}}
}

// elements writes the elements in as many messages as they need. It splits no element.
func (w *wire) elements(op nft.ElementOp, spec *setSpec, elements encoded) {
	w.Elements(op, spec.name, elements.buf, elements.size)
}

// getElements asks for elements by key. The kernel answers in this order, until the first that
// does not exist.
func (w *wire) getElements(spec *setSpec, keys []elementBytes) {
	w.ElementList(nft.GetElements(), spec.name, func() {
		for i := range keys {
			w.Buf = nft.AppendElement(w.Buf, keys[i].bytes(), nil, nil)
		}
	})
	w.Last().Answers = len(keys)
}

// verdictElement adds an element of a verdict map that leads to a chain.
func (w *wire) verdictElement(spec *setSpec, key uint32, chain string) {
	w.VerdictElement(spec.name, nativeUint32(key), either[int32](spec.jumps, unix.NFT_JUMP, unix.NFT_GOTO), chain)
}

// deleteMark deletes the element of a mark.
func (w *wire) deleteMark(spec *setSpec, key uint32) {
	element := nft.AppendElement(nil, nativeUint32(key), nil, nil)
	w.Elements(nft.DeleteElements(), spec.name, element, len(element))
}

func (w *wire) newTable() { w.NewTable(0, nft.Comment(tableComment)) }

// wakeTable clears the flag dormant of a table.
func (w *wire) wakeTable() {
	w.Start(unix.NFT_MSG_NEWTABLE, 0, "wake", "table "+w.Table)
	w.Text(unix.NFTA_TABLE_NAME, w.Table)
	w.Uint32(unix.NFTA_TABLE_FLAGS, 0)
	w.End()
}

// newSet creates a set. size limits the number of elements; 0 is for sets that packets do
// not write.
func (w *wire) newSet(spec *setSpec, size uint32) {
	w.NewSet(&nft.Set{Name: spec.name, ID: uint32(spec.id) + 1, Key: spec.key, Data: spec.data, Flags: spec.flags(), Size: size})
}

// newChain creates a chain without its rules.
func (w *wire) newChain(c *chainSpec) {
	if c.hook == nil {
		w.NewChain(c.name, nil, nil)
		return
	}
	w.NewChain(c.name, &nft.Hook{Kind: c.hook.kind, Number: c.hook.number, Priority: c.hook.priority}, nft.Comment(layoutVersion))
}

// newRule appends a rule of encoded expressions, with their checksum in its user data.
func (w *wire) newRule(chain string, exprs [][]byte, sum []byte) {
	w.NewRule(chain, exprs, nft.Userdata(udataChecksum, sum))
	w.Last().Detail = func() string { return fmt.Sprintf("%q", ruleText(w.Family, exprs)) }
}

const (
	// tableComment marks a table as ours. In all versions, its sets have the meaning that
	// setSpecs gives their names.
	tableComment = "programmed by serviceplane"
	// layoutVersion is the comment of the base chains. They are replaced in the same
	// transaction as all other rules.
	layoutVersion = "serviceplane layout 1"
	checksumLen   = 8
	// udataChecksum is the type of checksums in the user data of rules, far from those of nft.
	udataChecksum = 0x5e
)

func nativeUint32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
