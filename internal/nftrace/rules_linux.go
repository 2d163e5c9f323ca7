package nftrace

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/nftext"
)

// deleteLeftovers deletes the tables of traces whose program was killed.
func (s *session) deleteLeftovers() error {
	all := nft.Batch{Family: unix.NFPROTO_UNSPEC}
	all.List(unix.NFT_MSG_GETTABLE, "tables")
	answers, err := s.owner.AskAll(all.Buf)
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	for _, m := range answers {
		family, attrs := m.Netfilter()
		name := netlinkx.String(netlinkx.Find(attrs, unix.NFTA_TABLE_NAME))
		if !strings.HasPrefix(name, tablePrefix) {
			continue
		}
		held, err := lock(name)
		if err != nil {
			continue // in use
		}
		left := &table{name: name, family: family}
		err = left.transact(s.owner, (*nft.Batch).DeleteTable)
		_ = unix.Close(held)
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EPERM) { // the kernel deletes it just now
			return fmt.Errorf("delete table %s of a killed program: %w", name, err)
		}
	}
	return nil
}

// ask returns the attributes of what answers a question about a table, nil without an answer.
func (s *session) ask(family byte, table string, write func(b *nft.Batch)) (list [][]byte) {
	b := nft.Batch{Family: family, Table: table}
	write(&b)
	answers, err := s.owner.AskAll(b.Buf)
	if err != nil {
		return nil
	}
	for _, m := range answers {
		_, attrs := m.Netfilter()
		list = append(list, attrs)
	}
	return list
}

// place is a rule or a chain.
type place struct {
	family, table, chain string
	handle               uint64
}

// hook is where a base chain is.
type hook struct {
	name     string
	priority int
}

// resolve completes the steps with the hooks of base chains and the texts of rules. What was
// deleted meanwhile has no text.
func (s *session) resolve(packets []TracedPacket) {
	bases, texts := map[place]hook{}, map[place]nftext.Rule{}
	for i := range packets {
		for j := range packets[i].Steps {
			step := &packets[i].Steps[j]
			base := place{step.Family, step.Table, step.Hook, 0}
			if _, known := bases[base]; !known {
				bases[base] = s.hook(base)
			}
			step.Hook, step.Priority = bases[base].name, bases[base].priority
			if step.Handle == 0 {
				continue
			}
			at := place{step.Family, step.Table, step.Chain, step.Handle}
			if _, known := texts[at]; !known {
				texts[at] = s.rule(at)
			}
			step.Rule, step.Comment = texts[at].Text, texts[at].Comment
			if texts[at].Unknown {
				step.Command = fmt.Sprintf("nft -a list chain %s %s %s", at.family, at.table, at.chain)
			}
			if texts[at].Rejects && step.Verdict == verdictDrop {
				step.Verdict = verdictReject
			}
		}
	}
}

// hook returns that of a base chain.
func (s *session) hook(at place) (h hook) {
	for _, attrs := range s.ask(familyNumber(at.family), at.table, func(b *nft.Batch) { b.GetChain(at.chain) }) {
		if of := netlinkx.Find(attrs, unix.NFTA_CHAIN_HOOK); of != nil {
			h.name = hooks[int(netlinkx.Uint32(netlinkx.Find(of, unix.NFTA_HOOK_HOOKNUM)))]
			h.priority = int(int32(netlinkx.Uint32(netlinkx.Find(of, unix.NFTA_HOOK_PRIORITY))))
		}
	}
	return h
}

// rule reads a rule.
func (s *session) rule(at place) (r nftext.Rule) {
	for _, attrs := range s.ask(familyNumber(at.family), at.table, func(b *nft.Batch) { b.GetRule(at.chain, at.handle) }) {
		r = s.describe(familyNumber(at.family), at.table, attrs)
	}
	return r
}

// describe decodes the attributes of a rule.
func (s *session) describe(family byte, table string, attrs []byte) nftext.Rule {
	r := nftext.Print(family, netlinkx.Values(netlinkx.Find(attrs, unix.NFTA_RULE_EXPRESSIONS)), func(name string) *nftext.Set { return s.readSet(family, table, name) }, s.device)
	r.Comment = netlinkx.String(nft.FindUserdata(netlinkx.Find(attrs, unix.NFTA_RULE_USERDATA), nft.UserdataComment))
	return r
}

// device returns the name of an interface; empty if it is gone.
func (s *session) device(index uint32) (name string) {
	_ = namespace.Visit(s.netNS, func() error { // without a name the number is printed
		i, err := net.InterfaceByIndex(int(index))
		if err == nil {
			name = i.Name
		}
		return err
	})
	return name
}

// legacyTables returns the tables of iptables-legacy in a network namespace.
func legacyTables(netNS string, family byte) (names []string, err error) {
	file := "ip_tables_names"
	if family == unix.NFPROTO_IPV6 {
		file = "ip6_tables_names"
	}
	err = namespace.Visit(netNS, func() error {
		f, err := os.Open("/proc/thread-self/net/" + file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // its module is not loaded
		}
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			names = append(names, lines.Text())
		}
		return lines.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list the tables of iptables-legacy: %w", err)
	}
	return names, nil
}
