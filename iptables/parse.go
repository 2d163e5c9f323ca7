package iptables

import (
	"bufio"
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// observed is what a table holds that matters to an instance.
type observed struct {
	chains ruleset // its own
	// jumps are the rules of others' chains that lead to its own.
	jumps []foreignJump
}

type foreignJump struct {
	chain string
	to    string
	rule  rule
}

// parse reads what iptables-save prints of one table. Counters are not printed in
// rules, and those of chains are ignored. Lines about chains of others are checked
// for jumps only.
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
				return o, fmt.Errorf("parse iptables-save: line %d: %q is no chain", number, line)
			}
			if owns(chain) {
				o.chains[chain] = notNil(o.chains[chain])
			}
		case strings.HasPrefix(line, "-A "):
			chain, text, _ := strings.Cut(line[3:], " ") // a rule may be there to count only
			o.rule(chain, rule(strings.Clone(text)), owns)
		}
	}
	if err := lines.Err(); err != nil {
		return o, fmt.Errorf("parse iptables-save: line %d: %w", number+1, err)
	}
	return o, nil
}

func (o *observed) rule(chain string, r rule, owns func(string) bool) {
	if owns(chain) {
		o.chains[chain] = append(o.chains[chain], r)
		return
	}
	if to := r.jumpsTo(); owns(to) {
		o.jumps = append(o.jumps, foreignJump{chain, to, r})
	}
}

// jumpsTo is the target of a rule. Quoted text may hold anything.
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

// withoutComment is the rule without its comments, and with one space between words.
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

// quoteEnd is where the text behind a quoted one begins.
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

// builtIn are the chains of the kernel. Only in these are jumps to our chains ours: in
// their own chains, others may use ours.
func builtIn() []string {
	return []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
}

// held are the chains that others' chains lead to. They cannot be deleted.
func (o *observed) held() map[string]bool {
	held := map[string]bool{}
	for _, j := range o.jumps {
		if !slices.Contains(builtIn(), j.chain) {
			held[j.to] = true
		}
	}
	return held
}

// repairJumps returns the commands that bring the jumps of a table to what they must
// be: those that are missing are put in front, and those that lead from the kernel's
// chains to ours in another way, or to chains that go, are deleted.
func repairJumps(table string, want []jump, have []foreignJump) (deletes, inserts []string) {
	isWanted := func(h foreignJump) bool {
		return slices.ContainsFunc(want, func(w jump) bool { return w.table == table && w.is(h) })
	}
	for i, h := range have {
		if !slices.Contains(builtIn(), h.chain) {
			continue
		}
		twice := slices.ContainsFunc(have[:i], func(o foreignJump) bool { return o.chain == h.chain && o.rule == h.rule })
		if !isWanted(h) || twice {
			deletes = append(deletes, "-D "+h.chain+" "+string(h.rule))
		}
	}
	for _, w := range want {
		if w.table == table && !slices.ContainsFunc(have, w.is) {
			inserts = append(inserts, "-I "+w.chain+" 1 "+string(w.rule))
		}
	}
	return deletes, inserts
}

// jumpsAfter are the jumps from the kernel's chains to ours once a write has repaired them.
func (o *observed) jumpsAfter(table string, write *tablePart, into map[chainID][]rule) {
	gone := slices.Clone(write.deletes)
	for _, j := range o.jumps {
		id := chainID{table, j.chain}
		if i := slices.Index(gone, "-D "+j.chain+" "+string(j.rule)); i >= 0 {
			gone = slices.Delete(gone, i, i+1)
		} else if slices.Contains(builtIn(), j.chain) {
			into[id] = append(into[id], j.rule)
		}
	}
	for _, command := range write.inserts {
		fields := strings.SplitN(command, " ", 4) // -I chain 1 rule
		id := chainID{table, fields[1]}
		into[id] = slices.Insert(into[id], 0, rule(fields[3]))
	}
}

// is compares all but the comment: other versions, and kube-proxy, say it otherwise.
func (j jump) is(h foreignJump) bool {
	return j.chain == h.chain && j.to == h.to && j.rule.withoutComment() == h.rule.withoutComment()
}
