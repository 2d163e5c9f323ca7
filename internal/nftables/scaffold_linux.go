package nftables

import (
	"crypto/sha256"
	"fmt"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// scaffold writes the constant part of the table.
func (w *wire) scaffold(l *layout, sizeOf func(*setSpec) uint32) error {
	w.newTable()
	for i := range setSpecs {
		spec := &setSpecs[i]
		w.newSet(spec, l.addrLen(), sizeOf(spec))
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
			exprs, sum, err := r.encode(w.family)
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
	h := sha256.New()
	for _, e := range r {
		b, err := marshal(family, e)
		if err != nil {
			return nil, nil, fmt.Errorf("encode expression %T: %w", e, err)
		}
		exprs = append(exprs, b)
		h.Write(b)
	}
	return exprs, h.Sum(nil)[:checksumLen], nil
}

func marshal(family uint8, e expr.Any) ([]byte, error) {
	if a, ok := e.(tracked); ok {
		return a.marshal(), nil
	}
	return expr.Marshal(family, e)
}

// newChain creates a chain without its rules.
func (w *wire) newChain(c *chainSpec) {
	w.begin(msgNewChain, unix.NLM_F_CREATE, "add", "chain "+c.name)
	w.attrString(unix.NFTA_CHAIN_TABLE, w.table)
	w.attrString(unix.NFTA_CHAIN_NAME, c.name)
	if c.hook != nil {
		w.nest(unix.NFTA_CHAIN_HOOK, func() {
			w.attrUint32(unix.NFTA_HOOK_HOOKNUM, c.hook.number)
			w.attrUint32(unix.NFTA_HOOK_PRIORITY, uint32(c.hook.priority))
		})
		w.attrString(unix.NFTA_CHAIN_TYPE, c.hook.kind)
		w.attr(chainUserdata, userdataString(udataComment, layoutVersion))
	}
	w.endMessage()
}
