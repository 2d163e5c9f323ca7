package iptables

import (
	"bufio"
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
)

// observed is the part of a table that concerns an instance.
type observed struct {
	chains ruleset // of the instance
	// jumps are the rules of all other chains that jump to chains of the instance.
	jumps []jump
}

// parse reads the output of iptables-save for one table. It ignores the counters of
// chains; rules have none.
func parse(text []byte, owns func(chain string) bool) (observed, error) {
	o := observed{chains: ruleset{}}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	number := 0
	for lines.Scan() {
		number++
		line := lines.Text()
		switch {
		case strings.HasPrefix(line, ":"):
			chain, _, ok := strings.Cut(line[1:], " ")
			if !ok || chain == "" {
				return o, fmt.Errorf("parse iptables-save: line %d: %q is not a chain", number, line)
			}
			if owns(chain) {
				o.chains[chain] = notNil(o.chains[chain])
			}
		case strings.HasPrefix(line, "-A "):
			chain, text, _ := strings.Cut(line[3:], " ") // a rule that only counts has no text
			r := rule(strings.Clone(text))
			if owns(chain) {
				o.chains[chain] = append(o.chains[chain], r)
			} else if to := r.jumpsTo(); owns(to) {
				o.jumps = append(o.jumps, jump{chain, to, r})
			}
		}
	}
	if err := lines.Err(); err != nil {
		return o, fmt.Errorf("parse iptables-save: line %d: %w", number+1, err)
	}
	return o, nil
}

// jumpsTo is the target of a rule, "" if there is none. Quoted text is skipped.
func (r rule) jumpsTo() string {
	text := string(r.withoutComment())
	var bare strings.Builder
	for {
		before, after, quoted := strings.Cut(text, `"`)
		bare.WriteString(before)
		if !quoted {
			break
		}
		text = after[quoteEnd(after):]
	}
	fields := strings.Fields(bare.String())
	for i := range max(0, len(fields)-1) {
		if fields[i] == "-j" || fields[i] == "-g" {
			return fields[i+1]
		}
	}
	return ""
}

// frontend is the frontend that a rule matches; ok is false if it matches none, or more.
func (r rule) frontend() (key desired.Key, ok bool) {
	if !strings.Contains(string(r), " --dport ") {
		return key, false
	}
	words := strings.Fields(string(r.withoutComment()))
	for i := range max(0, len(words)-1) {
		switch value := words[i+1]; words[i] {
		case "!", "-s":
			return key, false
		case "-d":
			addr, bits, _ := strings.Cut(value, "/")
			key.VIP, _ = netip.ParseAddr(addr)
			if !key.VIP.IsValid() || bits != "" && bits != strconv.Itoa(key.VIP.BitLen()) {
				return key, false
			}
		case "-p":
			key.Protocol, _ = desired.ProtocolOf(v1.Protocol(strings.ToUpper(value)))
		case "--dport":
			port, err := strconv.ParseUint(value, 10, 16)
			key.Port, ok = uint16(port), err == nil
		}
	}
	return key, ok
}

// frontendsLeft returns the frontends that rules have, and that are not wanted.
func frontendsLeft(have, want ruleset) []desired.Key {
	left, wanted := have.frontends(), want.frontends()
	maps.DeleteFunc(left, func(key desired.Key, _ bool) bool { return wanted[key] })
	return slices.Collect(maps.Keys(left))
}

func (s ruleset) frontends() map[desired.Key]bool {
	all := map[desired.Key]bool{}
	for _, rules := range s {
		for _, r := range rules {
			if key, ok := r.frontend(); ok {
				all[key] = true
			}
		}
	}
	return all
}

// withoutComment is the rule without comments, with single spaces between words.
func (r rule) withoutComment() rule {
	const begin = "-m comment --comment "
	text := string(r)
	for {
		text = strings.Join(strings.Fields(text), " ")
		before, after, ok := strings.Cut(text, begin)
		if !ok {
			return rule(text)
		}
		if rest, quoted := strings.CutPrefix(after, `"`); quoted {
			after = rest[quoteEnd(rest):]
		} else if _, rest, ok := strings.Cut(after, " "); ok {
			after = rest
		} else {
			after = ""
		}
		text = before + " " + after
	}
}

// quoteEnd is the index after the closing quote.
func quoteEnd(text string) int {
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(text)
}

// referenced are the chains that chains of other programs jump to. They cannot be deleted.
func (o *observed) referenced() map[string]bool {
	referenced := map[string]bool{}
	for _, j := range o.jumps {
		if !slices.Contains(builtInChains, j.chain) {
			referenced[j.to] = true
		}
	}
	return referenced
}
