package coexistence

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/proxier"
)

// rules are all rules of a network namespace but those of our nf_tables tables.
type rules struct {
	// chains are those of iptables, by program, table and name.
	chains map[string]chain
	// others are the tables of nf_tables that are not iptables', with handles, and ipsets.
	others string
}

type chain struct {
	policy string // "-": the chain is not built in
	rules  []string
}

var savers = []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"} // read-only

// rules reads the rules. A table of iptables without any is as good as none.
func (s *sandbox) rules() rules {
	s.t.Helper()
	var script strings.Builder
	for _, saver := range savers {
		fmt.Fprintf(&script, "%s 2>/dev/null; echo '# END'\n", saver)
	}
	script.WriteString("nft -a -s list ruleset\nipset save\n")
	parts := strings.Split(s.run(script.String()), "# END\n")
	r := rules{chains: map[string]chain{}, others: foreignTables(parts[len(parts)-1])}
	for i, saver := range savers {
		maps.Copy(r.chains, parseSaved(saver, parts[i]))
	}
	return r
}

// parseSaved parses the output of iptables-save.
func parseSaved(program, text string) map[string]chain {
	all, table := map[string]chain{}, map[string]chain{}
	prefix := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch fields := strings.Fields(line); {
		case strings.HasPrefix(line, "*"):
			prefix, table = program+" "+line[1:]+" ", map[string]chain{}
		case strings.HasPrefix(line, ":"):
			table[prefix+fields[0][1:]] = chain{policy: fields[1]}
		case strings.HasPrefix(line, "-A "):
			c := table[prefix+fields[1]]
			c.rules = append(c.rules, line)
			table[prefix+fields[1]] = c
		case line == "COMMIT":
			used := func(c chain) bool { return c.policy != "ACCEPT" || len(c.rules) > 0 }
			if slices.ContainsFunc(slices.Collect(maps.Values(table)), used) {
				maps.Copy(all, table)
			}
		}
	}
	return all
}

var (
	// ownedElsewhere are tables of iptables-nft, which iptables-save prints, and ours.
	ownedElsewhere = regexp.MustCompile(`(?ms)^table ip6? (?:nat|filter|mangle|raw|security|` + regexp.QuoteMeta(proxier.KubeProxyNames().Table) + `) \{.*?^\}\n`) // read-only
	handle         = regexp.MustCompile(` # handle \d+`)                                                                                                           // read-only
	warning        = regexp.MustCompile(`(?m)^# Warning: .*\n`)                                                                                                    // read-only
)

func foreignTables(listed string) string {
	listed = warning.ReplaceAllString(listed, "")
	// nft looks up the program that owns a table, and does not always find it.
	listed = regexp.MustCompile(`(?m)^(table .* \{.*) progname .*$`).ReplaceAllString(listed, "$1")
	// Handles of tables follow the brace.
	listed = regexp.MustCompile(`(?m)^(table .* \{) # handle \d+$`).ReplaceAllString(listed, "$1")
	return ownedElsewhere.ReplaceAllString(listed, "")
}

// kept reports how the rules of others in now differ from before. Chains may have been
// added, and rules to built-in chains.
func (before rules) kept(now rules) string {
	var diffs []string
	for name, was := range before.chains {
		is, found := now.chains[name]
		rest := is
		if found && was.policy != "-" {
			rest.rules = common(was.rules, is.rules)
		}
		if diff := gocmp.Diff(was, rest, gocmp.AllowUnexported(chain{})); !found || diff != "" {
			diffs = append(diffs, fmt.Sprintf("chain %s, found: %v, -before +now:\n%s", name, found, diff))
		}
	}
	if diff := gocmp.Diff(before.others, now.others); diff != "" {
		diffs = append(diffs, diff)
	}
	return strings.Join(diffs, "\n")
}

// common returns those rules of now that a walk through before finds, in the order of now.
func common(before, now []string) (found []string) {
	for _, rule := range now {
		if slices.Contains(before, rule) {
			found = append(found, rule)
		}
	}
	return found
}

// equal reports how now differs from before, in any way.
func (before rules) equal(now rules) string {
	return gocmp.Diff(before, now, gocmp.AllowUnexported(rules{}, chain{}))
}

// withoutHandles are the rules as they are after they were written again.
func (r rules) withoutHandles() rules {
	r.others = handle.ReplaceAllString(r.others, "")
	return r
}
