package packettrace

import (
	"context"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// TraceWithoutOwner is Trace on a kernel that does not know the flag: no kernel knows this one.
func TraceWithoutOwner(ctx context.Context, o Options) (Result, error) {
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
	err = namespace.Visit(netNS, func() (err error) {
		s.owner, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.owner.Close() }()
	answers, err := s.owner.Execute(request(unix.NFT_MSG_GETRULE, familyNumber(family), netlink.Dump, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, table)
		ae.String(unix.NFTA_RULE_CHAIN, chain)
	}))
	for _, m := range answers {
		r := s.describe(table, m.Data)
		list = append(list, RuleText{r.Text, r.Comment, r.Unknown})
	}
	return list, err
}
