package allpackets

import (
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
)

// iptRules are the chains that iptables-save prints, by table and name.
type iptRules map[string][]iptRule

// iptRule is a rule in words. Each match is true for a packet that passes it.
type iptRule struct {
	matches []func(*iptRun) bool
	target  string
	args    []string
}

func readIPTables(ns *netns.NS, family v1.IPFamily, variant string) (ruleset, error) {
	program := "iptables-" + variant + "-save"
	if family == v1.IPv6Protocol {
		program = "ip6tables-" + variant + "-save"
	}
	var out []byte
	err := ns.Do(func() (err error) {
		out, err = exec.Command(program).Output()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", program, err)
	}
	return parseRules(string(out))
}

// parseRules parses the output of iptables-save.
func parseRules(saved string) (ruleset, error) {
	rules, table := iptRules{}, ""
	for line := range strings.Lines(saved) {
		words := words(line)
		switch {
		case len(words) == 0:
		case strings.HasPrefix(words[0], "*"):
			table = words[0][1:]
		case words[0] == "-A":
			rule, err := parseRule(words[2:])
			if err != nil {
				return nil, fmt.Errorf("%q: %w", line, err)
			}
			chain := table + " " + words[1]
			rules[chain] = append(rules[chain], rule)
		}
	}
	return rules, nil
}

// words splits a line; a comment in quotes is one word.
func words(line string) (all []string) {
	for i, part := range strings.Split(strings.TrimSpace(line), `"`) {
		if i%2 == 1 {
			all = append(all, part)
		} else {
			all = append(all, strings.Fields(part)...)
		}
	}
	return all
}

// parseRule reads options with their arguments.
func parseRule(words []string) (rule iptRule, err error) {
	for len(words) > 0 && err == nil {
		not := words[0] == "!"
		if not {
			words = words[1:]
		}
		end := 1
		for end < len(words) && !strings.HasPrefix(words[end], "-") && words[end] != "!" {
			end++
		}
		option, args := words[0], words[1:end]
		words = words[end:]
		if option == "-j" || option == "-g" {
			if option == "-g" {
				return rule, fmt.Errorf("goto is unknown")
			}
			rule.target, rule.args = args[0], words
			return rule, nil
		}
		var match func(*iptRun) bool
		if match, err = parseMatch(option, args); match != nil {
			rule.matches = append(rule.matches, func(r *iptRun) bool { return match(r) != not })
		}
	}
	return rule, err
}

// parseMatch returns nil for an option that changes nothing for first packets.
func parseMatch(option string, args []string) (func(*iptRun) bool, error) {
	arg := strings.Join(args, " ")
	switch option {
	case "-m", "--comment", "--mode", "--seconds", "--reap", "--name", "--mask", "--rsource", "--nfacct-name", "--set":
		return nil, nil
	case "-s", "-d":
		return matchAddress(option, arg)
	case "-p":
		return func(r *iptRun) bool { return strings.EqualFold(r.protocol.String(), arg) }, nil
	case "--dport":
		return matchPort(arg)
	case "--dst-type":
		return func(r *iptRun) bool { return r.isLocal(r.dest.Addr()) }, nil
	case "--src-type":
		return func(r *iptRun) bool { return r.fromNode || r.isLocal(r.source.Addr()) }, nil
	case "--probability":
		return func(r *iptRun) bool { return r.dice(2) == 1 }, nil
	case "--rcheck": // no client has come yet
		return func(*iptRun) bool { return false }, nil
	case "--ctstate":
		states := strings.Split(arg, ",")
		return func(r *iptRun) bool {
			return slices.Contains(states, "NEW") || r.translated && slices.Contains(states, "DNAT")
		}, nil
	case "--mark":
		value, mask, err := markOf(arg)
		return func(r *iptRun) bool { return r.mark&mask == value }, err
	}
	return nil, fmt.Errorf("option %s is unknown", option)
}

// matchAddress: a mask need not be a prefix.
func matchAddress(option, arg string) (func(*iptRun) bool, error) {
	text, maskText, _ := strings.Cut(arg, "/")
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return nil, err
	}
	var mask []byte
	if bits, err := strconv.Atoi(maskText); err == nil {
		mask = make([]byte, addr.BitLen()/8)
		for bit := range bits {
			mask[bit/8] |= 0x80 >> (bit % 8)
		}
	} else {
		a, err := netip.ParseAddr(maskText)
		if err != nil {
			return nil, err
		}
		mask = a.AsSlice()
	}
	return func(r *iptRun) bool {
		at := r.source.Addr()
		if option == "-d" {
			at = r.dest.Addr()
		}
		for i, b := range at.AsSlice() {
			if b&mask[i] != addr.AsSlice()[i] {
				return false
			}
		}
		return true
	}, nil
}

func matchPort(arg string) (func(*iptRun) bool, error) {
	low, high, isRange := strings.Cut(arg, ":")
	if !isRange {
		high = low
	}
	from, err := strconv.Atoi(low)
	if err != nil {
		return nil, err
	}
	to, err := strconv.Atoi(high)
	return func(r *iptRun) bool { port := int(r.dest.Port()); return from <= port && port <= to }, err
}

func markOf(text string) (value, mask uint32, err error) {
	v, m, found := strings.Cut(text, "/")
	if !found {
		m = "0xffffffff"
	}
	n, err := strconv.ParseUint(v, 0, 32)
	if err != nil {
		return 0, 0, err
	}
	k, err := strconv.ParseUint(m, 0, 32)
	return uint32(n), uint32(k), err
}

// iptRun is a packet in a table.
type iptRun struct {
	*packet

	rules iptRules
	dice  func(int) int
	table string
	done  bool
}

// walk implements ruleset.
func (rules iptRules) walk(p *packet, dice func(int) int) error {
	way := []string{"nat PREROUTING", "filter FORWARD", "nat POSTROUTING"}
	if p.fromNode {
		way = []string{"nat OUTPUT", "filter OUTPUT", "nat POSTROUTING"}
	}
	for i, hook := range way {
		if i > 0 && !p.fromNode && p.isLocal(p.dest.Addr()) {
			if hook = "filter INPUT"; i > 1 {
				return nil
			}
		}
		r := &iptRun{packet: p, rules: rules, dice: dice, table: strings.Fields(hook)[0]}
		if err := r.chain(strings.Fields(hook)[1]); err != nil || p.verdict != "" {
			return err
		}
	}
	return nil
}

func (r *iptRun) chain(name string) error {
rules:
	for _, rule := range r.rules[r.table+" "+name] {
		for _, match := range rule.matches {
			if !match(r) {
				continue rules
			}
		}
		if rule.target == "RETURN" {
			return nil
		}
		if err := r.target(rule); err != nil || r.done {
			return err
		}
	}
	return nil
}

func (r *iptRun) target(rule iptRule) error {
	switch rule.target {
	case "":
	case "ACCEPT":
		r.done = true
	case "DROP", "REJECT":
		r.done, r.verdict = true, strings.ToLower(rule.target)
	case "MASQUERADE":
		r.done, r.masq = true, true
	case "MARK":
		value, mask, err := markOf(rule.args[1])
		r.mark = r.mark&^mask ^ value
		return err
	case "DNAT":
		to, err := netip.ParseAddrPort(rule.args[1])
		r.done, r.translated, r.dest = true, true, to
		return err
	default:
		return r.chain(rule.target)
	}
	return nil
}
