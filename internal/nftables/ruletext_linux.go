package nftables

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/nftext"
)

// ruleText prints the encoded expressions of a rule as nft does.
func ruleText(family uint8, exprs [][]byte) string {
	addrLen := map[uint8]int{unix.NFPROTO_IPV4: 4, unix.NFPROTO_IPV6: 16}[family]
	set := func(name string) *nftext.Set {
		key := setNamed(name).key
		if isLimitSet(name) {
			key = vipAndSourceFields
		}
		return &nftext.Set{KeySize: nft.Padded(key, addrLen)}
	}
	return nftext.Print(family, slices.Values(exprs), set, nil).Text
}
