package nftrace

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// TraceWithoutOwner is Trace on a kernel that does not know the flag: no kernel knows this one.
func TraceWithoutOwner(ctx context.Context, o Options) (TraceResult, error) {
	return trace(ctx, o.withDefaults(), 1<<31)
}

// RuleText is what is printed of a rule. Unknown means that a part of it is only a name.
type RuleText struct {
	Text, Comment string
	Unknown       bool
}

// RuleTexts returns what is printed of the rules of a chain, in order.
func RuleTexts(netNS, family, table, chain string) (list []RuleText, err error) {
	s := &session{netNS: netNS}
	if s.owner, err = nft.Dial(netNS); err != nil {
		return nil, err
	}
	defer func() { _ = s.owner.Close() }()
	for _, attrs := range s.ask(familyNumber(family), table, func(b *nft.Batch) {
		b.Start(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, "list", "rules")
		b.Text(unix.NFTA_RULE_TABLE, table)
		b.Text(unix.NFTA_RULE_CHAIN, chain)
		b.End()
	}) {
		r := s.describe(familyNumber(family), table, attrs)
		list = append(list, RuleText{r.Text, r.Comment, r.Unknown})
	}
	return list, nil
}
