package nftables

import (
	"crypto/sha256"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// scaffold writes the constant part of the table.
func (w *wire) scaffold(l *layout, sizeOf func(*setSpec) uint32) error {
	w.newTable()
	for i := range setSpecs {
		if spec := &setSpecs[i]; l.rules.has(spec) {
			w.newSet(spec, sizeOf(spec))
		}
	}
	if l.rules.fastAfter > 0 {
		w.newFlowtable()
	}
	if err := w.chains(l.chains()); err != nil {
		return err
	}
	for class, to := range staticClasses() {
		for _, in := range to.from {
			w.verdictElement(&setSpecs[in], class, to.chain)
		}
	}
	return nil
}

// chains writes chains with their rules. All chains come first, because rules may lead to
// any of them.
func (w *wire) chains(chains []chainSpec) error {
	for i := range chains {
		w.newChain(&chains[i])
	}
	for i := range chains {
		for _, r := range chains[i].rules {
			exprs, sum, err := r.encode(w.Family)
			if err != nil {
				return err
			}
			w.newRule(chains[i].name, exprs, sum)
		}
	}
	return nil
}

// encode returns the expressions as netlink attributes, and a checksum of them that
// identifies the rule when it is read back.
func (r rule) encode(family uint8) (exprs [][]byte, sum []byte, err error) {
	if exprs, err = nft.Encode(family, r...); err != nil {
		return nil, nil, err
	}
	h := sha256.New()
	for _, e := range exprs {
		h.Write(e)
	}
	return exprs, h.Sum(nil)[:checksumLen], nil
}
