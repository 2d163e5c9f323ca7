package iptables

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

func ours(chain string) bool { return strings.HasPrefix(chain, "SP-") }

func mustOpenProber(tb testing.TB, family v1.IPFamily, v Variant, netNS string) *prober {
	tb.Helper()
	p, err := newProber(family, v, netNS, ours)
	if err != nil {
		tb.Fatalf("open prober: %v", err)
	}
	tb.Cleanup(func() {
		if err := p.close(); err != nil {
			tb.Errorf("close prober: %v", err)
		}
	})
	return p
}

func mustProbe(tb testing.TB, p *prober) fingerprint {
	tb.Helper()
	f, err := p.probe()
	if err != nil {
		tb.Fatalf("probe: %v", err)
	}
	return f
}

// somebody runs the program that people use, with the arguments in a line.
func somebody(t *testing.T, tool *tool, line string) {
	t.Helper()
	program := "iptables-" + string(tool.variant)
	if tool.config.family == v1.IPv6Protocol {
		program = "ip6tables-" + string(tool.variant)
	}
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("needs iptables: %v", err)
	}
	o, err := tool.config.run(t.Context(), 0, nil, append([]string{path}, strings.Fields(line)...)...)
	if err != nil || o.err != nil {
		t.Fatalf("%s %s: %v, %v: %s", program, line, err, o.err, o.complaint)
	}
}

// loadOurs loads what the changes of the tests meet.
func loadOurs(tb testing.TB, tool *tool) {
	tb.Helper()
	mustRestore(tb, tool,
		"*filter", ":SP-TOP - [0:0]", ":FOREIGN - [0:0]", "-I INPUT -j SP-TOP", "-A SP-TOP -j RETURN", "COMMIT",
		"*nat", ":SP-TOP - [0:0]", ":SP-LEAF - [0:0]", ":SP-FREE - [0:0]", ":FOREIGN - [0:0]",
		"-I PREROUTING -j SP-TOP", "-A PREROUTING -j FOREIGN",
		"-A SP-TOP -j SP-LEAF", "-A SP-LEAF -p tcp -j RETURN", "-A SP-LEAF -p udp -j RETURN", "COMMIT")
}

func TestFingerprintShowsWhatOthersDidToUs(t *testing.T) {
	changes := map[string]string{
		"a chain is flushed":        "-t nat -F SP-LEAF",
		"a rule is deleted":         "-t nat -D SP-LEAF 1",
		"a rule is added":           "-t nat -A SP-LEAF -j RETURN",
		"a chain is deleted":        "-t nat -X SP-FREE",
		"the jump is deleted":       "-t nat -D PREROUTING -j SP-TOP",
		"the table is flushed":      "-t nat -F",
		"the built-in is flushed":   "-t nat -F PREROUTING",
		"filter: a rule is deleted": "-t filter -D SP-TOP 1",
		"filter: jump is deleted":   "-t filter -D INPUT -j SP-TOP",
	}
	eachTool(t, func(t *testing.T, tool *tool) {
		loadOurs(t, tool)
		p := mustOpenProber(t, tool.config.family, tool.variant, tool.config.netNS)
		for name, line := range changes {
			before := mustProbe(t, p)
			if got := mustProbe(t, p); got != before {
				t.Fatalf("%s: fingerprint = %+v without a change, want %+v", name, got, before)
			}
			somebody(t, tool, line)
			if after := mustProbe(t, p); after == before {
				t.Errorf("%s: fingerprint = %+v before and after", name, after)
			}
			somebody(t, tool, "-t nat -F PREROUTING")
			somebody(t, tool, "-t filter -F INPUT")
			loadOurs(t, tool)
		}
	})
}

func TestFingerprintSurvivesRestoreOfTheSame(t *testing.T) {
	eachTool(t, func(t *testing.T, tool *tool) {
		loadOurs(t, tool)
		p := mustOpenProber(t, tool.config.family, tool.variant, tool.config.netNS)
		before := mustProbe(t, p)
		mustRestore(t, tool, "*nat", ":SP-LEAF - [0:0]", "-A SP-LEAF -p tcp -j RETURN", "-A SP-LEAF -p udp -j RETURN", "COMMIT")
		if after := mustProbe(t, p); after != before {
			t.Errorf("fingerprint = %+v, want %+v", after, before)
		}
	})
}

func TestForeignChangesLeaveNFTFingerprintAlone(t *testing.T) {
	changes := []string{
		"-t nat -A FOREIGN -p tcp -j RETURN", "-t nat -F FOREIGN", "-t nat -N FOREIGN-2", "-t nat -X FOREIGN-2",
		"-t nat -A PREROUTING -p tcp -j RETURN", "-t nat -D PREROUTING -j FOREIGN", "-t filter -P FORWARD DROP",
		"-t mangle -N SP-MANGLE", "-t nat -Z",
	}
	eachTool(t, func(t *testing.T, tool *tool) {
		if tool.variant == VariantLegacy {
			return // its fingerprint has the rules of others
		}
		loadOurs(t, tool)
		p := mustOpenProber(t, tool.config.family, tool.variant, tool.config.netNS)
		before := mustProbe(t, p)
		for _, line := range changes {
			somebody(t, tool, line)
			if after := mustProbe(t, p); after != before {
				t.Errorf("%s: fingerprint = %+v, want %+v", line, after, before)
			}
		}
	})
}

func TestProbeCreatesNoTable(t *testing.T) {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		ns := netnstest.New(t)
		p := mustOpenProber(t, family, VariantLegacy, ns.Path())
		before := mustProbe(t, p)
		if before != (fingerprint{}) {
			t.Errorf("fingerprint = %+v without tables, want zero", before)
		}
		for _, table := range []string{"nat", "filter"} {
			if exists, err := legacyTableExists(family, ns.Path(), table); exists || err != nil {
				t.Errorf("table %s exists: %v, %v, want false, nil", table, exists, err)
			}
		}
		mustOpenTool(t, testConfig(t, ns, VariantLegacy, family)) // creates them
		after := mustProbe(t, p)
		if after == before || after.nat.Entries == 0 || after.filter.Entries == 0 {
			t.Errorf("fingerprint = %+v, want two tables", after)
		}
	}
}

func TestUnprivilegedProbeIsErrPermission(t *testing.T) {
	netnstest.Unprivileged(t, func(t *testing.T) {
		legacy := mustOpenProber(t, v1.IPv4Protocol, VariantLegacy, "")
		if _, err := legacy.legacy.info("nat"); !errors.Is(err, proxier.ErrPermission) {
			t.Errorf("info = %v, want ErrPermission", err)
		}
		for _, v := range []Variant{VariantLegacy, VariantNFT} {
			if _, err := mustOpenProber(t, v1.IPv4Protocol, v, "").probe(); !errors.Is(err, proxier.ErrPermission) {
				t.Errorf("probe %s = %v, want ErrPermission", v, err)
			}
		}
	})
}

func TestProberOutsideOfAnyNamespaceFails(t *testing.T) {
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		if _, err := newProber(v1.IPv4Protocol, v, "/nowhere", ours); err == nil {
			t.Errorf("newProber %s succeeds, want an error", v)
		}
	}
}

// Budget: 0.1 ms unchanged; 20 ms after a change, which is 2 % of a core if somebody
// changes something each second.
func BenchmarkProbe(b *testing.B) {
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		ns := netnstest.New(b)
		tool := mustOpenTool(b, testConfig(b, ns, v, v1.IPv4Protocol))
		lines := []string{"*nat"}
		for i := range 10000 {
			lines = append(lines, fmt.Sprintf(":SP-%d - [0:0]", i))
		}
		for i := range 10000 {
			lines = append(lines, fmt.Sprintf("-A SP-%d -j RETURN", i))
		}
		mustRestore(b, tool, append(lines, "COMMIT")...)
		p := mustOpenProber(b, v1.IPv4Protocol, v, ns.Path())
		b.Run(string(v)+"/unchanged", func(b *testing.B) {
			for b.Loop() {
				mustProbe(b, p)
			}
		})
		if v == VariantNFT {
			b.Run(string(v)+"/changed", func(b *testing.B) {
				for b.Loop() {
					p.nft.known = false
					mustProbe(b, p)
				}
			})
		}
	}
}
