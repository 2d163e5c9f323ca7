package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

func ours(chain string) bool { return strings.HasPrefix(chain, "SP-") }

func mustWatch(tb testing.TB, tool *tool) watcher {
	tb.Helper()
	w, err := tool.watcher(ours)
	if err != nil {
		tb.Fatalf("watch: %v", err)
	}
	tb.Cleanup(func() {
		if err := w.close(); err != nil {
			tb.Errorf("close: %v", err)
		}
	})
	mustCheck(tb, w)
	return w
}

func mustCheck(tb testing.TB, w watcher) *proxier.Damage {
	tb.Helper()
	d, err := w.check(true)
	if err != nil {
		tb.Fatalf("check: %v", err)
	}
	return d
}

// runOther runs iptables as another program would, with the arguments in a line.
func runOther(t *testing.T, tool *tool, line string) {
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
		t.Fatalf("%s %s: %v, %v: %s", program, line, err, o.err, o.stderr)
	}
}

// loadOurs loads the rules that the tests change.
func loadOurs(tb testing.TB, tool *tool) {
	tb.Helper()
	mustRestore(tb, tool,
		"*filter", ":SP-TOP - [0:0]", ":FOREIGN - [0:0]", "-I INPUT -j SP-TOP", "-A SP-TOP -j RETURN", "COMMIT",
		"*nat", ":SP-TOP - [0:0]", ":SP-LEAF - [0:0]", ":SP-FREE - [0:0]", ":FOREIGN - [0:0]",
		"-I PREROUTING -j SP-TOP", "-A PREROUTING -j FOREIGN",
		"-A SP-TOP -j SP-LEAF", "-A SP-LEAF -p tcp -j RETURN", "-A SP-LEAF -p udp -j RETURN", "COMMIT")
}

func TestWatcherDetectsDamage(t *testing.T) {
	changes := map[string]string{
		"a chain is flushed":        "-t nat -F SP-LEAF",
		"a rule is deleted":         "-t nat -D SP-LEAF 1",
		"a rule is added":           "-t nat -A SP-LEAF -j RETURN",
		"a rule is replaced":        "-t nat -R SP-LEAF 1 -p sctp -j RETURN",
		"a target is replaced":      "-t nat -R SP-LEAF 1 -p tcp -j ACCEPT",
		"a jump is replaced":        "-t nat -R SP-TOP 1 -j SP-FREE",
		"a jump does nothing":       "-t nat -R SP-TOP 1",
		"a jump becomes a goto":     "-t nat -R SP-TOP 1 -g SP-LEAF",
		"a chain is deleted":        "-t nat -X SP-FREE",
		"a chain is renamed":        "-t nat -E SP-FREE LOST",
		"a chain is made":           "-t nat -N SP-MORE",
		"the jump is deleted":       "-t nat -D PREROUTING -j SP-TOP",
		"the jump is limited":       "-t nat -R PREROUTING 1 -p tcp -j SP-TOP",
		"the jump leads elsewhere":  "-t nat -R PREROUTING 1 -j FOREIGN",
		"the table is flushed":      "-t nat -F",
		"the built-in is flushed":   "-t nat -F PREROUTING",
		"filter: a rule is deleted": "-t filter -D SP-TOP 1",
		"filter: jump is deleted":   "-t filter -D INPUT -j SP-TOP",
	}
	eachTool(t, func(t *testing.T, tool *tool) {
		loadOurs(t, tool)
		w := mustWatch(t, tool)
		for name, line := range changes {
			if d := mustCheck(t, w); d != nil {
				t.Errorf("%s: %v before it, want nothing", name, d)
			}
			runOther(t, tool, line)
			d := mustCheck(t, w)
			if d == nil {
				t.Errorf("%s: not detected", name)
			} else if isNamed := strings.Contains(d.Object, " of table ip") && strings.Contains(d.By, "tables-nft (process "); isNamed != (tool.variant == VariantNFT) {
				t.Errorf("%s: damage = %+v, want names with the nft variant only", name, *d)
			}
			for _, table := range []string{"nat", "filter"} {
				runOther(t, tool, "-t "+table+" -F")
				runOther(t, tool, "-t "+table+" -X")
			}
			loadOurs(t, tool)
			mustCheck(t, w)
		}
	})
}

func TestWatcherDistinguishesOwnWrites(t *testing.T) {
	leaf := map[chainID][]rule{{tableNAT, "SP-LEAF"}: {"-p tcp -j RETURN", "-p sctp -j RETURN"}}
	leafAndJump := maps.Clone(leaf)
	leafAndJump[chainID{tableNAT, "PREROUTING"}] = []rule{"-p tcp -j SP-TOP", "-j SP-TOP"}
	write := []string{"*nat", ":SP-LEAF - [0:0]", "-A SP-LEAF -p tcp -j RETURN", "-A SP-LEAF -p sctp -j RETURN", "COMMIT"}
	inserted := append([]string{"*nat", "-I PREROUTING 1 -p tcp -j SP-TOP"}, write[1:]...)
	for name, c := range map[string]struct {
		script        []string
		before, after string // commands of another program
		written       map[chainID][]rule
		isDamage      bool
	}{
		"no other program":                {script: write, written: leaf},
		"the same elsewhere":              {script: write, written: leaf, before: "-t nat -R SP-TOP 1 -j SP-FREE", isDamage: true},
		"the same elsewhere, later":       {script: write, written: leaf, after: "-t nat -R SP-TOP 1 -j SP-FREE", isDamage: true},
		"a jump is limited":               {script: write, written: leaf, after: "-t nat -R PREROUTING 1 -p tcp -j SP-TOP", isDamage: true},
		"a rule of what was written goes": {script: write, written: leaf, after: "-t nat -D SP-LEAF 1", isDamage: true},
		"a written rule is replaced":      {script: write, written: leaf, after: "-t nat -R SP-LEAF 1 -p udp -j RETURN", isDamage: true},
		"a written chain is flushed":      {script: write, written: leaf, after: "-t nat -F SP-LEAF", isDamage: true},
		"a chain of others":               {script: write, written: leaf, before: "-t nat -A FOREIGN -j RETURN", after: "-t nat -N OTHER"},
		"a jump of ours":                  {script: inserted, written: leafAndJump},
		"a jump of ours, and it goes":     {script: inserted, written: leafAndJump, after: "-t nat -D PREROUTING 1", isDamage: true},
	} {
		t.Run(name, func(t *testing.T) {
			eachTool(t, func(t *testing.T, tool *tool) {
				loadOurs(t, tool)
				w := mustWatch(t, tool)
				mustRestore(t, tool, write...)
				if d, err := w.wrote(&effect{transactions: 1, written: leaf}); d != nil || err != nil {
					t.Fatalf("wrote = %v, %v at first, want nothing", d, err)
				}
				err := w.during(nil, func() error {
					if c.before != "" {
						runOther(t, tool, c.before)
					}
					mustRestore(t, tool, c.script...)
					if c.after != "" {
						runOther(t, tool, c.after)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
				d, err := w.wrote(&effect{transactions: 1, written: c.written})
				if (d != nil) != c.isDamage || err != nil {
					t.Errorf("wrote = %v, %v, want damage: %v", d, err, c.isDamage)
				}
				if d := mustCheck(t, w); d != nil {
					t.Errorf("check afterwards = %v, want nothing", d)
				}
			})
		})
	}
}

func TestWatcherIgnoresOtherChains(t *testing.T) {
	changes := []string{
		"-t nat -A FOREIGN -p tcp -j RETURN", "-t nat -A FOREIGN -j SP-FREE", "-t nat -F FOREIGN", "-t nat -N FOREIGN-2", "-t nat -X FOREIGN-2",
		"-t nat -A PREROUTING -p tcp -j RETURN", "-t nat -I PREROUTING -p tcp -j FOREIGN", "-t nat -D PREROUTING -j FOREIGN",
		"-t filter -P FORWARD DROP", "-t mangle -N SP-MANGLE", "-t nat -Z FOREIGN",
	}
	eachTool(t, func(t *testing.T, tool *tool) {
		loadOurs(t, tool)
		w := mustWatch(t, tool)
		for _, line := range changes {
			runOther(t, tool, line)
			if d := mustCheck(t, w); d != nil {
				t.Errorf("%s: %v, want nothing", line, d)
			}
		}
	})
}

// TestNFTWatcherCountsTransactionsAfterAnOverrun: if the buffer is too small, the number of
// transactions shows whether another program wrote.
func TestNFTWatcherCountsTransactionsAfterAnOverrun(t *testing.T) {
	tool := mustOpenTool(t, testConfig(t, netnstest.New(t), VariantNFT, v1.IPv4Protocol))
	loadOurs(t, tool)
	w := mustWatch(t, tool).(*nftWatcher)
	_, err := w.events.Enlarge(unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, 1) // the kernel's minimum
	netnstest.Check(t, err)
	script := []string{"*nat", ":SP-MANY - [0:0]"}
	for i := range 200 {
		script = append(script, fmt.Sprintf("-A SP-MANY -p tcp --dport %d -j RETURN", i+1))
	}
	for _, theirs := range []string{"", "-t nat -N OTHER"} {
		mustRestore(t, tool, append(script, "COMMIT")...)
		if theirs != "" {
			runOther(t, tool, theirs)
		}
		d, err := w.wrote(&effect{transactions: 1})
		if (d != nil) != (theirs != "") || err != nil {
			t.Errorf("wrote = %v, %v beside %q", d, err, theirs)
		}
	}
	runOther(t, tool, "-t nat -E SP-MANY LOST")
	if mustCheck(t, w) == nil {
		t.Error("a change afterwards is not detected")
	}
}

func TestFamilyFilter(t *testing.T) {
	vm, err := bpf.NewVM(familyFilter(unix.NFPROTO_IPV4))
	if err != nil {
		t.Fatalf("the filter is not a program: %v", err)
	}
	type message struct {
		kind, family byte
		size         int // of what follows the header
	}
	const ip4, ip6, none = unix.NFPROTO_IPV4, unix.NFPROTO_IPV6, unix.NFPROTO_UNSPEC
	rule6 := message{unix.NFT_MSG_NEWRULE, ip6, 301}
	for name, c := range map[string]struct {
		messages []message
		isKept   bool
	}{
		"a rule":                     {[]message{{unix.NFT_MSG_NEWRULE, ip4, 20}}, true},
		"a chain that goes":          {[]message{{unix.NFT_MSG_DELCHAIN, ip4, 20}}, true},
		"the end":                    {[]message{{unix.NFT_MSG_NEWGEN, none, 20}}, true},
		"the other family":           {[]message{rule6, rule6, rule6}, false},
		"an element":                 {[]message{{unix.NFT_MSG_NEWSETELEM, ip4, 20}}, false},
		"a rule behind others":       {[]message{rule6, {unix.NFT_MSG_NEWSETELEM, ip4, 5}, rule6, {unix.NFT_MSG_DELRULE, ip4, 4}}, true},
		"more than are checked":      {slices.Repeat([]message{{unix.NFT_MSG_DELRULE, ip6, 4}}, 40), true},
		"the other family at length": {slices.Repeat([]message{rule6}, 12), false},
	} {
		var packet []byte
		for _, m := range c.messages {
			b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+m.size))
			b = binary.NativeEndian.AppendUint16(b, unix.NFNL_SUBSYS_NFTABLES<<8|uint16(m.kind))
			b = append(b, make([]byte, unix.NLMSG_HDRLEN-len(b))...)
			b = append(b, m.family)
			packet = append(packet, append(b, make([]byte, (m.size+3)&^3-1)...)...)
		}
		if n, err := vm.Run(packet); (n > 0) != c.isKept || err != nil {
			t.Errorf("%s: %d bytes kept, %v, want any: %v", name, n, err, c.isKept)
		}
	}
}

func TestWatcherCreatesNoTable(t *testing.T) {
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		ns := netnstest.New(t)
		w := mustWatch(t, &tool{config: testConfig(t, ns, VariantLegacy, family), variant: VariantLegacy})
		for _, table := range []string{"nat", "filter"} {
			if exists, err := legacyTableExists(family, ns.Path(), table); exists || err != nil {
				t.Errorf("table %s exists: %v, %v, want false, nil", table, exists, err)
			}
		}
		created := mustOpenTool(t, testConfig(t, ns, VariantLegacy, family)) // creates them
		if d := mustCheck(t, w); d != nil {
			t.Errorf("check = %v with empty tables, want nothing", d)
		}
		loadOurs(t, created)
		if d := mustCheck(t, w); d == nil {
			t.Error("chains are not detected")
		}
	}
}

func TestUnprivilegedWatchIsErrPermission(t *testing.T) {
	netnstest.Unprivileged(t, func(t *testing.T) {
		legacy, err := openLegacyTables(v1.IPv4Protocol, "")
		if err != nil {
			t.Fatal(err)
		}
		defer legacy.close()
		if _, err := legacy.info("nat"); !errors.Is(err, proxier.ErrPermission) {
			t.Errorf("info = %v, want ErrPermission", err)
		}
		if _, err := newNFTWatcher(toolConfig{family: v1.IPv4Protocol}, ours); !errors.Is(err, proxier.ErrPermission) {
			t.Errorf("newNFTWatcher = %v, want ErrPermission", err)
		}
	})
}

func TestWatcherOutsideOfAnyNamespaceFails(t *testing.T) {
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		if _, err := (&tool{config: toolConfig{family: v1.IPv4Protocol, netNS: "/nowhere"}, variant: v}).watcher(ours); err == nil {
			t.Errorf("watcher %s opens, want an error", v)
		}
	}
}

// BenchmarkCheck measures a check of the rules of 5,000 Services of ten endpoints.
func BenchmarkCheck(b *testing.B) {
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		ns := netnstest.New(b)
		tool := mustOpenTool(b, testConfig(b, ns, v, v1.IPv4Protocol))
		lines := []string{"*nat"}
		for i := range 5000 {
			lines = append(lines, fmt.Sprintf(":SP-%d - [0:0]", i))
		}
		for i := range 50000 {
			lines = append(lines, fmt.Sprintf("-A SP-%d -p tcp -m comment --comment test -m statistic --mode random --probability 0.5 -j DNAT --to-destination 10.1.2.3:80", i/10))
		}
		mustRestore(b, tool, append(lines, "COMMIT")...)
		w := mustWatch(b, tool)
		b.Run(string(v), func(b *testing.B) {
			for b.Loop() {
				mustCheck(b, w)
			}
		})
	}
}
