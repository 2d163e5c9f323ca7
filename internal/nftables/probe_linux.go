package nftables

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
)

// minKernel is the oldest kernel that the tests run on. The newest part of the layout is user
// data of tables and chains (5.10), by which a successor recognizes them.
const minKernel = "5.10"

// feature is a part of nf_tables that the layout needs: a set, a rule, or both.
type feature struct {
	name, option string
	exprs        []expr.Any
	set          *setSpec
	flowtable    bool // and the hook of the fast path
}

// unknown are the kernel's errors for what it does not know. All others, such as ENOMEM, say nothing
// about what it has.
var unknown = []error{unix.ENOENT, unix.EOPNOTSUPP, unix.EINVAL, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT} // read-only

// explain adds the missing features to an error of the kernel. It tries each feature
// alone, in a transaction that always fails, so that nothing is left in the kernel.
func (e *Engine) explain(ctx context.Context, refused error, features []feature) error {
	if errors.Is(refused, proxier.ErrPermission) {
		return refused
	}
	errs := []error{refused}
	for _, f := range features {
		err := e.probe(ctx, f)
		if slices.ContainsFunc(unknown, func(errno error) bool { return errors.Is(err, errno) }) {
			err = f.missing(err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// missing is the error that a kernel does not have the feature.
func (f *feature) missing(err error) error {
	return &proxier.UnsupportedError{
		Feature: "nf_tables " + f.name + " on " + nft.KernelRelease(),
		Hint:    fmt.Sprintf("want Linux %s or newer with %s", minKernel, f.option),
		Err:     err,
	}
}

func (e *Engine) features() []feature {
	r := &e.state.layout.rules

	return []feature{
		{name: "concatenated keys", option: "CONFIG_NF_TABLES", set: &setSpecs[setServices]},
		{name: "ranges in concatenated keys", option: "CONFIG_NF_TABLES", set: &setSpecs[setSourceRanges]},
		{name: "ranges", option: "CONFIG_NF_TABLES", set: &setSpecs[setServiceCIDRs]},
		{name: "maps written by packets", option: "CONFIG_NF_TABLES", set: &setSpecs[setAffinity]},
		{name: "expression fib", option: "CONFIG_NFT_FIB_IPV4 and CONFIG_NFT_FIB_IPV6", exprs: []expr.Any{
			&expr.Fib{Register: reg(0), ResultADDRTYPE: true, FlagDADDR: true},
		}},
		{name: "expression numgen", option: "CONFIG_NFT_NUMGEN", exprs: []expr.Any{
			&expr.Numgen{Register: reg(0), Modulus: 2, Type: unix.NFT_NG_RANDOM},
		}},
		{name: "expression nat", option: "CONFIG_NFT_NAT", exprs: append([]expr.Any{r.daddr(0)},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(e.batch.Family), RegAddrMin: reg(0)})},
		{name: "expression reject", option: "CONFIG_NFT_REJECT", exprs: slices.Concat(r.reject()...)},
		{name: "expression ct", option: "CONFIG_NFT_CT", exprs: []expr.Any{&expr.Ct{Key: expr.CtKeySTATUS, Register: reg(0)}}},
		{name: "setting the packet mark", option: "CONFIG_NF_TABLES", exprs: r.setMark()},
		{name: "setting the packet priority", option: "CONFIG_NF_TABLES", exprs: []expr.Any{priority(0), setPriority(reg(0))}},
	}
}

// probe returns the kernel's error for a feature, nil if it has the feature.
func (e *Engine) probe(ctx context.Context, f feature) error {
	w := e.newBatch()
	w.Table += "-probe"
	defer func(table string) { w.Table = table }(e.config.Names.Table)
	w.newTable()
	if f.set != nil {
		w.newSet(f.set, e.config.AffinityRecords)
	}
	hook := &hookSpec{"nat", unix.NF_INET_PRE_ROUTING, "prerouting", e.config.DNATPriority}
	if f.flowtable {
		hook = fastPathHook()
		w.newFlowtable()
	}
	if f.exprs != nil {
		chain := chainSpec{name: "probe", hook: hook, rules: []rule{f.exprs}}
		if err := w.chains([]chainSpec{chain}); err != nil {
			return err
		}
	}
	const poison = "chain that is not there"
	w.Start(unix.NFT_MSG_DELCHAIN, 0, "delete", poison)
	w.Text(unix.NFTA_CHAIN_TABLE, w.Table)
	w.Text(unix.NFTA_CHAIN_NAME, "not-there")
	w.End()
	before := e.report
	err := e.send(ctx, w)
	e.report.Transactions, e.report.Bytes = before.Transactions, before.Bytes // nothing is written
	if refusedObject(err) == poison+" in table "+w.Table {
		return nil
	}
	return err
}
