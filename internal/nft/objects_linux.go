package nft

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
)

// Attributes of linux/netfilter/nf_tables.h that package unix does not have.
const (
	TableUserdata = 6  // NFTA_TABLE_USERDATA
	ChainUserdata = 12 // NFTA_CHAIN_USERDATA
	SetCount      = 20 // NFTA_SET_COUNT

	FlowtableTable   = 1      // NFTA_FLOWTABLE_TABLE
	FlowtableName    = 2      // NFTA_FLOWTABLE_NAME
	FlowtableFlags   = 7      // NFTA_FLOWTABLE_FLAGS
	FlowtableCounter = 1 << 1 // NFT_FLOWTABLE_COUNTER
)

// NewTable creates a table, or changes its flags. userdata may be nil.
func (b *Batch) NewTable(flags uint32, userdata []byte) {
	b.Start(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add", "table "+b.Table)
	b.Text(unix.NFTA_TABLE_NAME, b.Table)
	if flags != 0 {
		b.Uint32(unix.NFTA_TABLE_FLAGS, flags)
	}
	if userdata != nil {
		b.Attr(TableUserdata, userdata)
	}
	b.End()
}

// kind is a kind of objects, with the attributes of its table and its name.
type kind struct {
	text        string
	table, name uint16
}

// The kinds of objects. All rules of a chain, and all elements of a set, have its name.
var (
	chainKind   = kind{"chain ", unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME}                          // read-only
	ruleKind    = kind{"rule in chain ", unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN}                   // read-only
	setKind     = kind{"set ", unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME}                                // read-only
	elementKind = kind{"elements of set ", unix.NFTA_SET_ELEM_LIST_TABLE, unix.NFTA_SET_ELEM_LIST_SET} // read-only
)

// start writes the beginning of a message about an object.
func (b *Batch) start(k *kind, msg, flags uint16, op, name string) {
	b.Start(msg, flags, op, k.text+name)
	b.Text(k.table, b.Table)
	b.Text(k.name, name)
}

// message writes a message about an object that says nothing else of it.
func (b *Batch) message(k *kind, msg, flags uint16, op, name string) {
	b.start(k, msg, flags, op, name)
	b.End()
}

// DeleteTable deletes the table.
func (b *Batch) DeleteTable() {
	b.Start(unix.NFT_MSG_DELTABLE, 0, "delete", "table "+b.Table)
	b.Text(unix.NFTA_TABLE_NAME, b.Table)
	b.End()
}

// ReplaceTable makes the table empty, in a transaction with what follows.
func (b *Batch) ReplaceTable() {
	b.NewTable(0, nil)
	b.DeleteTable()
	b.NewTable(0, nil)
}

// ListFlowtables asks for the flowtables of all tables of the family. A flowtable must fit one page of the
// dump, or the kernel leaves it out: after the socket has received something a page has 32 kB, which are
// about 1,900 devices, and before that 4 kB.
func (b *Batch) ListFlowtables() {
	b.Start(unix.NFT_MSG_GETFLOWTABLE, unix.NLM_F_DUMP, "list", "flowtables")
	b.End()
}

// FindFlowtable describes a flowtable of a network namespace whose flags are wanted, of any table. It is empty if
// there is none; a kernel without flowtables has none.
func FindFlowtable(ctx context.Context, netNS string, wanted func(flags uint32) bool) (text string) {
	k, err := Dial(netNS)
	if err != nil {
		return ""
	}
	defer func() { _ = k.Close() }()
	b := Batch{Family: unix.NFPROTO_UNSPEC}
	b.ListFlowtables()
	_ = k.Dump(ctx, &b, func() { text = "" }, func(attrs []byte) {
		if wanted(netlinkx.Uint32(netlinkx.Find(attrs, FlowtableFlags))) {
			table, name := netlinkx.Find(attrs, FlowtableTable), netlinkx.Find(attrs, FlowtableName)
			text = fmt.Sprintf("flowtable %s of table %s", netlinkx.String(name), netlinkx.String(table))
		}
	})
	return text
}

// Hook makes a chain a base chain.
type Hook struct {
	Kind     string // "filter" or "nat"
	Number   uint32 // NF_INET_*
	Priority int32
}

// NewChain creates a chain without rules. A base chain has a hook, and maybe userdata.
func (b *Batch) NewChain(name string, hook *Hook, userdata []byte) {
	b.start(&chainKind, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, "add", name)
	if hook != nil {
		b.Nest(unix.NFTA_CHAIN_HOOK, func() {
			b.Uint32(unix.NFTA_HOOK_HOOKNUM, hook.Number)
			b.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(hook.Priority))
		})
		b.Text(unix.NFTA_CHAIN_TYPE, hook.Kind)
	}
	if userdata != nil {
		b.Attr(ChainUserdata, userdata)
	}
	b.End()
}

// DeleteChain deletes a chain.
func (b *Batch) DeleteChain(name string) {
	b.message(&chainKind, unix.NFT_MSG_DELCHAIN, 0, "delete", name)
}

// GetChain asks for a chain.
func (b *Batch) GetChain(name string) { b.message(&chainKind, unix.NFT_MSG_GETCHAIN, 0, "read", name) }

// NewRule appends a rule of encoded expressions. userdata may be nil.
func (b *Batch) NewRule(chain string, exprs [][]byte, userdata []byte) {
	b.start(&ruleKind, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, "add", chain)
	b.Nest(unix.NFTA_RULE_EXPRESSIONS, func() {
		for _, e := range exprs {
			b.Attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, e)
		}
	})
	if userdata != nil {
		b.Attr(unix.NFTA_RULE_USERDATA, userdata)
	}
	b.End()
}

// FlushChain deletes the rules of a chain.
func (b *Batch) FlushChain(name string) {
	b.message(&ruleKind, unix.NFT_MSG_DELRULE, 0, "delete each", name)
}

// GetRule asks for a rule.
func (b *Batch) GetRule(chain string, handle uint64) {
	b.start(&ruleKind, unix.NFT_MSG_GETRULE, 0, "read", chain)
	b.Uint64(unix.NFTA_RULE_HANDLE, handle)
	b.End()
}

// List asks for all objects of the family and one kind: msg is NFT_MSG_GET*.
func (b *Batch) List(msg uint16, objects string) {
	b.Start(msg, unix.NLM_F_DUMP, "list", objects)
	b.End()
}

// User data is a list of type, length and value, with one byte each for type and length (udata.h of libnftnl).
const userdataHeader = 2

// UserdataComment is the type of comments of tables, chains and rules.
const UserdataComment = 0

// Userdata encodes one value of user data.
func Userdata(typ uint8, value []byte) []byte {
	return append([]byte{typ, uint8(len(value))}, value...)
}

// Comment encodes a comment.
func Comment(s string) []byte { return Userdata(UserdataComment, append([]byte(s), 0)) }

// FindUserdata returns the value of a type; nil if there is none.
func FindUserdata(b []byte, typ uint8) []byte {
	for len(b) >= userdataHeader {
		end := userdataHeader + int(b[1])
		if end > len(b) {
			return nil
		}
		if b[0] == typ {
			return b[userdataHeader:end]
		}
		b = b[end:]
	}
	return nil
}
