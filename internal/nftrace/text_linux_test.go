package nftrace_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nftrace"
)

var (
	counterNumbers = regexp.MustCompile(`counter packets \d+ bytes \d+`)
	commentOfRule  = regexp.MustCompile(` comment "[^"]*"$`)
	repeatedBlanks = regexp.MustCompile(` +`)
)

// rulesByNFT returns the rules of a chain as nft lists them, without the numbers of counters, which
// change, and without comments, which are not part of the text.
func rulesByNFT(t *testing.T, run func(script string) string, in chainOf) (list []string) {
	t.Helper()
	chain := ""
	for line := range strings.Lines(run("nft list table " + in.family + " " + in.table)) { // nft takes some names of chains for words of its own
		if words := strings.Fields(line); len(words) == 3 && words[0] == "chain" {
			chain = words[1]
		}
		text := strings.TrimRight(strings.TrimLeft(line, "\t"), "\n")
		if chain != in.chain || !strings.HasPrefix(line, "\t\t") || strings.HasPrefix(text, "type ") || strings.HasPrefix(text, "comment ") {
			continue
		}
		text = repeatedBlanks.ReplaceAllString(counterNumbers.ReplaceAllString(text, "counter"), " ")
		list = append(list, strings.TrimSpace(commentOfRule.ReplaceAllString(text, "")))
	}
	return list
}

func shellIn(t *testing.T, ns *netns.NS, script string) (out string) {
	t.Helper()
	netnstest.Check(t, ns.Do(func() error {
		text, err := exec.CommandContext(t.Context(), "sh", "-e", "-c", script).Output()
		out = string(text)
		return err
	}))
	return out
}

// chainOf is a chain.
type chainOf struct{ family, table, chain string }

// Rules of firewalls are printed one by one as nft lists them. What the printer does not know, it says.
func TestRulesArePrintedLikeNFT(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	shellIn(t, ns, "nft -f testdata/declarations.nft")
	mustPrintAsNFT(t, ns, "nft", "testdata/rules.nft", func(line string) chainOf {
		words := strings.Fields(line) // add rule FAMILY TABLE CHAIN TEXT
		return chainOf{words[2], words[3], words[4]}
	})
}

// Rules of iptables are printed as nft prints them: nft translates the extensions that it knows.
func TestRulesOfIPTablesArePrintedLikeNFT(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	shellIn(t, ns, "for chain in DOCKER ufw-user-input cali-fw; do iptables-nft -N $chain; done")
	mustPrintAsNFT(t, ns, "iptables-nft", "testdata/iptables.txt", func(line string) chainOf {
		c := chainOf{"ip", "filter", "FORWARD"}
		for i, words := 0, strings.Fields(line); i+1 < len(words); i++ {
			switch words[i] {
			case "-t":
				c.table = words[i+1]
			case "-A":
				c.chain = words[i+1]
			}
		}
		return c
	})
}

// mustPrintAsNFT runs a program with each line of a file, and compares the rules. Lines that the
// kernel refuses are not compared.
func mustPrintAsNFT(t *testing.T, ns *netns.NS, program, file string, chain func(line string) chainOf) {
	t.Helper()
	content, err := os.ReadFile(file)
	netnstest.Check(t, err)
	chains, known, total := map[chainOf]bool{}, 0, 0
	for line := range strings.Lines(string(content)) {
		line = strings.TrimSpace(line)
		command := program + " " + line
		if program == "nft" { // its quotes are for itself
			command = "nft '" + line + "'"
		}
		err := ns.Do(func() error { return exec.CommandContext(t.Context(), "sh", "-c", command).Run() })
		if err != nil {
			t.Logf("refused: %s", line)
			continue
		}
		chains[chain(line)] = true
	}
	for c := range chains {
		names, some := mustCompare(t, func(script string) string { return shellIn(t, ns, script) }, ns.Path(), c)
		known, total = known+names, total+some
	}
	t.Logf("%d rules of %d are printed as nft prints them", known, total)
}

// mustCompare compares the rules of a chain, and returns how many are printed as nft prints them.
func mustCompare(t *testing.T, run func(script string) string, netNS string, in chainOf) (known, total int) {
	t.Helper()
	want := rulesByNFT(t, run, in)
	got, err := nftrace.RuleTexts(netNS, in.family, in.table, in.chain)
	netnstest.Check(t, err)
	if len(got) != len(want) {
		t.Fatalf("%v: %d rules, nft lists %d", in, len(got), len(want))
	}
	for i := range want {
		switch {
		case got[i].Text == want[i]:
			known++
		case !got[i].Unknown:
			t.Errorf("%v, rule %d is printed\n%s, nft prints\n%s", in, i+1, got[i].Text, want[i])
		default:
			t.Logf("not known: %s, printed as %s", want[i], got[i].Text)
		}
	}
	return known, len(want)
}

// Every rule of the engines is printed as nft prints it.
func TestOwnRulesArePrintedLikeNFT(t *testing.T) {
	for name, engine := range engines {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, engine)
			run := func(script string) string { return w.command(w.Node, "sh", "-e", "-c", script) }
			var table chainOf
			known, total := 0, 0
			for line := range strings.Lines(run("nft list ruleset")) {
				words := strings.Fields(line)
				if len(words) != 4 && len(words) != 3 {
					continue
				}
				switch words[0] {
				case "table":
					table = chainOf{words[1], words[2], ""}
				case "chain":
					chain := table
					chain.chain = words[1]
					names, some := mustCompare(t, run, w.Node.NetNS(), chain)
					known, total = known+names, total+some
				}
			}
			if known != total || total == 0 {
				t.Errorf("%d rules of %d are printed as nft prints them, want all", known, total)
			}
		})
	}
}
