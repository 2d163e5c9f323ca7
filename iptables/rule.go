package iptables

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"github.com/serviceplane/serviceplane/desired"
)

// rule is a rule as iptables-save prints it, without "-A" and its chain. Rules are written
// in that form, so that they can be compared with the kernel's as text.
type rule string

// ruleText builds a rule. Add the parts in the order in which iptables-save prints them:
// source, destination, interface, protocol, then the matches in any order, then the target.
type ruleText struct {
	b strings.Builder
}

func newRule() *ruleText { return &ruleText{} }

func (t *ruleText) add(format string, args ...any) *ruleText {
	if t.b.Len() > 0 {
		t.b.WriteByte(' ')
	}
	fmt.Fprintf(&t.b, format, args...)
	return t
}

func (t *ruleText) from(p netip.Prefix) *ruleText { return t.add("-s %s", prefixText(p)) }

func (t *ruleText) fromAddr(a netip.Addr) *ruleText { return t.add("-s %s", addrText(a)) }

func (t *ruleText) to(p netip.Prefix) *ruleText { return t.add("-d %s", prefixText(p)) }

func (t *ruleText) toAddr(a netip.Addr) *ruleText { return t.add("-d %s", addrText(a)) }

func (t *ruleText) protocol(p desired.Protocol) *ruleText { return t.add("-p %s", protocolText(p)) }

// port must follow protocol; a comment may be in between.
func (t *ruleText) port(p desired.Protocol, port uint16) *ruleText {
	return t.add("-m %s --dport %d", protocolText(p), port)
}

// comment is truncated, and characters that iptables would escape become question marks
// (XT_MAX_COMMENT_LEN of linux/netfilter/xt_comment.h is 256).
func (t *ruleText) comment(format string, args ...any) *ruleText {
	text := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune(" .:;/_-,>()[]", r) {
			return r
		}
		return '?'
	}, fmt.Sprintf(format, args...))
	const longest = 250
	return t.add(`-m comment --comment "%s"`, text[:min(len(text), longest)])
}

// chance matches with a probability, which is rounded so that iptables prints it
// unchanged. It adds nothing if the probability is 1.
func (t *ruleText) chance(wanted, of int) *ruleText {
	if wanted == of {
		return t
	}
	const one = 1 << 31 // probability 1 in xt_statistic_info.u.random.probability
	p := math.Round(one*float64(wanted)/float64(of)) / one
	return t.add("-m statistic --mode random --probability %s", strconv.FormatFloat(p, 'f', 11, 64))
}

// nfacct ends a rule that counts and has no target. iptables-save prints two spaces.
func (t *ruleText) nfacct(counter string) rule {
	return t.target("-m nfacct --nfacct-name  " + counter)
}

func (t *ruleText) jump(chain string) rule { return t.target("-j " + chain) }

func (t *ruleText) target(text string) rule {
	t.add("%s", text)
	return rule(t.b.String())
}

func protocolText(p desired.Protocol) string { return strings.ToLower(p.String()) }

func prefixText(p netip.Prefix) string { return v6Text(p.Addr()) + "/" + strconv.Itoa(p.Bits()) }

func addrText(a netip.Addr) string { return prefixText(netip.PrefixFrom(a, a.BitLen())) }

// v6Text formats an address as the C library does, which differs from Go if exactly the
// first six groups are 0.
func v6Text(a netip.Addr) string {
	if !a.Is6() {
		return a.String()
	}
	b := a.As16()
	high, middle, low := binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
	if high == 0 && middle == 0 && low>>16 != 0 {
		return "::" + netip.AddrFrom4([4]byte(b[12:])).String()
	}
	return a.String()
}

// The tables that the engine uses.
const (
	tableNAT    = "nat"
	tableFilter = "filter"
)

// builtInChains are the chains of the kernel, in the order of its hooks.
var builtInChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} // read-only

// ruleset holds the rules of chains by name. An empty slice is a chain without rules;
// where changes are meant, nil is a deleted chain.
type ruleset map[string][]rule

func (s ruleset) count() (rules int) {
	for _, chain := range s {
		rules += len(chain)
	}
	return rules
}

// notNil makes nil an empty chain.
func notNil(rules []rule) []rule {
	if rules == nil {
		return []rule{}
	}
	return rules
}

// chainID names a chain of a table.
type chainID struct{ table, chain string }

// jump is a rule of another chain that jumps to a chain of the instance.
type jump struct {
	chain, to string
	rule      rule
}
