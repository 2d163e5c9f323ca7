package nftables

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestRulesArePrintedAsNFTDoes compares the rules of Dump with those of "nft list": every
// chain, and every way to recognize pods.
func TestRulesArePrintedAsNFTDoes(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		m, listed := model{}, map[string]bool{}
		for n := range 30 {
			m[name(n)] = w.service(n)
		}
		for n, limit := range []changetracker.ClientLimit{{PerSecond: 20, Burst: 40, IPv4Bits: 24, IPv6Bits: 56}, {Open: 100, Drop: true}} {
			s := w.limited(100+n, limit)
			m[s.Name] = s
		}
		for _, podInterface := range []string{"", "veth0", "cali*"} {
			update := m.full(w)
			if podInterface != "" {
				update.Globals.PodCIDRs, update.Globals.PodInterface = nil, podInterface
			}
			ns := netnstest.New(t)
			e := w.engine(t, ns)
			mustApply(t, e, update)
			compareRules(t, e, ns, listed)
		}
		ns := netnstest.New(t)
		counting := w.counting(t, ns, true)
		mustApply(t, counting, m.full(w))
		compareRules(t, counting, ns, listed)
		ns = netnstest.New(t)
		f := w.front(t, ns)
		f.must(t, m.full(w), Behind{Holds: func(netip.Addr) bool { return true }})
		compareRules(t, f.Engine, ns, listed)
		if len(listed) < 70 {
			t.Errorf("%d objects are listed by name, want more", len(listed))
		}
	})
}

func compareRules(t *testing.T, e *Engine, ns *netns.NS, listed map[string]bool) {
	t.Helper()
	var dump strings.Builder
	netnstest.Check(t, e.Dump(t.Context(), &dump))
	ruleset := mustList(t, ns)
	mustListByName(t, ns, ruleset, listed)
	got, want := ruleLines(dump.String()), ruleLines(ruleset)
	if len(want) < 50 || !slices.Equal(got, want) {
		t.Errorf("printed\n%s\nnft prints\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// mustListByName lists each object of a ruleset by its name, unless that is in listed: nft cannot
// parse names that are its keywords.
func mustListByName(t *testing.T, ns *netns.NS, ruleset string, listed map[string]bool) {
	t.Helper()
	table := ""
	for line := range strings.Lines(ruleset) {
		words := strings.Fields(line)
		switch {
		case len(words) == 4 && words[0] == "table":
			table = words[1] + " " + words[2]
		case len(words) == 3 && words[2] == "{" && slices.Contains([]string{"chain", "set", "map"}, words[0]) && !listed[words[1]]:
			listed[words[1]] = true
			mustNFT(t, ns, "list "+words[0]+" "+table+" "+words[1])
		}
	}
}

// ruleLines are the chains of a ruleset with their rules, sorted by name.
func ruleLines(text string) []string {
	var chains []string
	for _, chain := range regexp.MustCompile(`(?s)\tchain \S+ \{\n.*?\n\t\}`).FindAllString(text, -1) {
		chains = append(chains, regexp.MustCompile(`(?m)^\t\t(comment|type) .*\n`).ReplaceAllString(chain, ""))
	}
	slices.Sort(chains)
	return strings.Split(strings.Join(chains, "\n"), "\n")
}
