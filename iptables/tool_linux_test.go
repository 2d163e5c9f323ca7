package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// testConfig is for a network namespace, with a lock of its own. It ends the test if programs
// would run in another one: tests must never change the machine's own tables.
func testConfig(tb testing.TB, ns *netns.NS, v Variant, family v1.IPFamily) toolConfig {
	tb.Helper()
	c := toolConfig{
		family: family, netNS: ns.Path(), variant: v, lockWait: 5 * time.Second, timeout: 30 * time.Second,
		lockFile: filepath.Join(tb.TempDir(), "lock"),
	}
	// Not /proc/self: that is the first thread, which Visit may have moved.
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		tb.Fatal(err)
	}
	o, err := c.run(tb.Context(), 0, nil, "readlink", "/proc/self/ns/net")
	got := strings.TrimSpace(string(o.output))
	if err != nil || o.err != nil || got == own || !strings.HasPrefix(got, "net:[") {
		tb.Fatalf("programs run in %q (%v, %v), want a network namespace other than the machine's %s", got, err, o.err, own)
	}
	return c
}

func mustOpenTool(tb testing.TB, c toolConfig) *tool {
	tb.Helper()
	tool, err := openTool(tb.Context(), c)
	if errors.Is(err, proxier.ErrNotSupported) && os.Getenv(netnstest.RequireKernel) != "1" {
		tb.Skipf("needs iptables: %v", err)
	}
	if err != nil {
		tb.Fatalf("open tool: %v", err)
	}
	return tool
}

// eachTool runs f with both variants and IP families, in a network namespace each.
func eachTool(t *testing.T, f func(t *testing.T, tool *tool)) {
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			t.Run(string(v)+" "+string(family), func(t *testing.T) {
				f(t, mustOpenTool(t, testConfig(t, netnstest.New(t), v, family)))
			})
		}
	}
}

func mustRestore(tb testing.TB, tool *tool, lines ...string) {
	tb.Helper()
	if err := tool.restore(tb.Context(), inputOf(lines...)); err != nil {
		tb.Fatalf("restore %q: %v", lines, err)
	}
}

func inputOf(lines ...string) []byte { return []byte(strings.Join(lines, "\n") + "\n") }

func mustSave(tb testing.TB, tool *tool, table string) string {
	tb.Helper()
	text, err := tool.save(tb.Context(), table)
	if err != nil {
		tb.Fatalf("save: %v", err)
	}
	return string(text)
}

func TestRestoredRulesAreSaved(t *testing.T) {
	eachTool(t, func(t *testing.T, tool *tool) {
		mustRestore(t, tool, "*nat", ":FOREIGN - [0:0]", "COMMIT")
		mustRestore(t, tool, "*nat", ":OURS - [0:0]", "-A OURS -m comment --comment \"a b\" -j RETURN", "COMMIT")
		got := mustSave(t, tool, "nat")
		for _, want := range []string{":FOREIGN - [0:0]", ":OURS - [0:0]", `-A OURS -m comment --comment "a b" -j RETURN`} {
			if !strings.Contains(got, want+"\n") {
				t.Errorf("saved %q, want %q in it", got, want)
			}
		}
	})
}

func TestOpenLeavesNoScratchChain(t *testing.T) {
	eachTool(t, func(t *testing.T, tool *tool) {
		for _, table := range []string{"nat", "filter"} {
			if got := mustSave(t, tool, table); strings.Contains(got, "SCRATCH") || strings.Contains(got, "-A") {
				t.Errorf("table %s has %q after openTool, want nothing of ours", table, got)
			}
		}
	})
}

// A cleanup deletes the scratch chain of a process that died while it started.
func TestCleanupDeletesTheScratchChain(t *testing.T) {
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		w := &world{t, netnstest.New(t), variant, proxier.DefaultNames()}
		for _, table := range []string{"nat", "filter"} {
			w.run("iptables-"+string(variant), "-w", "-t", table, "-N", chainNames{w.names.ChainPrefix}.scratch())
		}
		p, stop := w.start()
		stop()
		netnstest.Check(t, p.Cleanup(t.Context()))
		if got := w.save(); strings.Contains(got, "SCRATCH") {
			t.Errorf("%s: after Cleanup there is %q", variant, got)
		}
	}
}

func TestSaveCreatesNoTable(t *testing.T) {
	eachTool(t, func(t *testing.T, tool *tool) {
		for range 2 { // the first save must not create the table
			got := mustSave(t, tool, "mangle")
			if tool.variant == VariantLegacy && got != "" {
				t.Errorf("saved %q, want nothing", got)
			}
			if strings.Contains(got, " - [") || strings.Contains(got, "-A") {
				t.Errorf("saved %q, want no chains but the built-in ones", got)
			}
		}
		exists, err := legacyTableExists(tool.config.family, tool.config.netNS, "mangle")
		if err != nil || exists {
			t.Errorf("legacy table mangle exists: %v, %v, want false, nil", exists, err)
		}
	})
}

// Each case is preceded by the chains A and B, and a jump from A to B.
func TestRefusedLinesAreNamed(t *testing.T) {
	cases := map[string]struct {
		lines       []string
		nft, legacy []int
		nftText     string
	}{
		"unknown match": {
			lines: []string{"-A A -m nosuch -j RETURN"}, nft: []int{2}, legacy: []int{2}, nftText: "Couldn't load match",
		},
		"unknown target": {
			lines: []string{"-A A -j NOSUCH", "-A B -j RETURN"}, nft: []int{4}, legacy: []int{2}, nftText: "Chain 'NOSUCH' does not exist",
		},
		"unknown chain": {
			lines: []string{"-A B -j RETURN", "-A NOSUCH -j RETURN"}, nft: []int{3}, legacy: []int{3},
		},
		"bad option": {
			lines: []string{"-A A --nooption 5"}, nft: []int{2}, legacy: []int{2}, nftText: "unknown option",
		},
		"chain in use": {
			lines: []string{"-F B", "-X B"}, nft: []int{3}, legacy: []int{3}, nftText: "CHAIN_DEL failed",
		},
		"refused by the kernel": {
			lines: []string{"-A A -j RETURN", "-A A -j REJECT"}, nft: []int{3}, legacy: []int{4}, nftText: "RULE_APPEND failed",
		},
		"refused by the kernel twice": {
			lines: []string{"-A A -j REJECT", "-A B -j REJECT"}, nft: []int{2, 3}, legacy: []int{4}, nftText: "RULE_APPEND failed",
		},
		"not a command": {
			lines: []string{"hello"}, nft: []int{2}, legacy: []int{2},
		},
	}
	eachTool(t, func(t *testing.T, tool *tool) {
		mustRestore(t, tool, "*nat", ":A - [0:0]", ":B - [0:0]", "-A A -j B", "COMMIT")
		before := withoutComments(mustSave(t, tool, "nat"))
		for name, c := range cases {
			err := tool.restore(t.Context(), inputOf(slices.Concat([]string{"*nat"}, c.lines, []string{"COMMIT"})...))
			var refused *restoreError
			if !errors.As(err, &refused) {
				t.Errorf("%s: error = %v, want a restoreError", name, err)
				continue
			}
			want, text := c.nft, c.nftText
			if tool.variant == VariantLegacy {
				want, text = c.legacy, ""
			}
			if !slices.Equal(refused.Lines, want) || !strings.Contains(refused.Text, text) {
				t.Errorf("%s: lines = %v of %q, want %v and %q", name, refused.Lines, refused.Text, want, text)
			}
			if _, ok := errors.AsType[*exec.ExitError](err); !ok {
				t.Errorf("%s: error = %#v, want an exec.ExitError in it", name, err)
			}
		}
		if got := withoutComments(mustSave(t, tool, "nat")); got != before {
			t.Errorf("table is %s after refused restores, want %s", got, before)
		}
	})
}

func withoutComments(saved string) string {
	lines := slices.DeleteFunc(strings.Split(saved, "\n"), func(line string) bool { return strings.HasPrefix(line, "#") })
	return strings.Join(lines, "\n")
}

func TestTablesBeforeTheRefusedOneStay(t *testing.T) {
	eachTool(t, func(t *testing.T, tool *tool) {
		err := tool.restore(t.Context(), inputOf("*filter", ":GOOD - [0:0]", "COMMIT", "*nat", ":BAD - [0:0]", "-X NOSUCH", "COMMIT"))
		var refused *restoreError
		if !errors.As(err, &refused) || !slices.Equal(refused.Lines, []int{6}) {
			t.Errorf("error = %v, want a restoreError of line 6", err)
		}
		if got := mustSave(t, tool, "filter"); !strings.Contains(got, ":GOOD") {
			t.Errorf("table filter is %q, want chain GOOD", got)
		}
		if got := mustSave(t, tool, "nat"); strings.Contains(got, ":BAD") {
			t.Errorf("table nat is %q, want no chain BAD", got)
		}
	})
}

// flock takes the lock, and returns how to release it.
func flock(t *testing.T, path string) (release func()) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := f.Close(); err != nil {
			t.Errorf("release lock: %v", err)
		}
	}
}

func TestHeldLockIsAnErrorAfterLockWait(t *testing.T) {
	tool := mustOpenTool(t, testConfig(t, netnstest.New(t), VariantLegacy, v1.IPv4Protocol))
	tool.config.lockWait = time.Second
	defer flock(t, tool.config.lockFile)()
	began := time.Now()
	err := tool.restore(t.Context(), inputOf("*nat", ":A - [0:0]", "COMMIT"))
	took := time.Since(began)
	if !errors.Is(err, errLocked) || took < 900*time.Millisecond {
		t.Errorf("error = %v after %v, want errLocked after a second", err, took)
	}
}

func TestReleasedLockLetsRestoreContinue(t *testing.T) {
	tool := mustOpenTool(t, testConfig(t, netnstest.New(t), VariantLegacy, v1.IPv4Protocol))
	tool.config.lockWait = 10 * time.Second
	release := flock(t, tool.config.lockFile)
	released := make(chan time.Time, 1)
	time.AfterFunc(2*time.Second, func() {
		at := time.Now()
		release()
		released <- at
	})
	err := tool.restore(t.Context(), inputOf("*nat", ":A - [0:0]", "COMMIT"))
	done := time.Now()
	if late := done.Sub(<-released); err != nil || late < 0 {
		t.Errorf("restore ends %v after the release with %v, want after it and nil", late, err)
	}
}

func TestNFTVariantIgnoresTheLock(t *testing.T) {
	tool := mustOpenTool(t, testConfig(t, netnstest.New(t), VariantNFT, v1.IPv4Protocol))
	defer flock(t, tool.config.lockFile)()
	mustRestore(t, tool, "*nat", ":A - [0:0]", "COMMIT")
}

func TestUnprivilegedOpenIsErrPermission(t *testing.T) {
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		if _, err := (toolConfig{family: v1.IPv4Protocol, timeout: time.Minute}).find(t.Context(), v); err != nil {
			t.Skipf("needs iptables: %v", err)
		}
	}
	netnstest.Unprivileged(t, func(t *testing.T) {
		for _, v := range []Variant{VariantNFT, VariantLegacy} {
			c := toolConfig{family: v1.IPv4Protocol, variant: v, timeout: time.Minute, lockFile: filepath.Join(t.TempDir(), "lock")}
			if _, err := openTool(t.Context(), c); !errors.Is(err, proxier.ErrPermission) {
				t.Errorf("open %s = %v, want ErrPermission", v, err)
			}
		}
	})
}

func TestSlowProgramIsKilledWithItsDescendants(t *testing.T) {
	cases := map[string]string{
		"sleeps":                "sleep 60",
		"ignores SIGTERM":       "trap '' TERM; sleep 61 & sleep 60; sleep 60",
		"leaves a descendant":   "sleep 60 & exit 1",
		"descendant holds pipe": "(trap '' TERM HUP; sleep 60) & sleep 60",
	}
	for name, body := range cases {
		t.Run(name, func(t *testing.T) {
			group := filepath.Join(t.TempDir(), "group")
			c := toolConfig{
				family: v1.IPv4Protocol, lockWait: time.Second, timeout: 100 * time.Millisecond,
				netNS: netnstest.New(t).Path(),
				dir:   fakePrograms(t, "iptables v1.8.9 (nf_tables)", "echo $$ > "+group+"; "+body),
			}
			tool := &tool{config: c, variant: VariantNFT, programs: programs{restore: filepath.Join(c.dir, "iptables-restore")}}
			before := openFiles(t)
			err := tool.restore(t.Context(), inputOf("*nat", "COMMIT"))
			if err == nil {
				t.Error("restore = nil, want an error")
			}
			if name != "leaves a descendant" && (!errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "iptables-restore: killed after ")) {
				t.Errorf("error = %v, want DeadlineExceeded, the program and how long", err)
			}
			if after := openFiles(t); after != before {
				t.Errorf("%d files are open, want %d as before", after, before)
			}
			mustBeGone(t, group)
		})
	}
}

// TestOutputThatStaysOpen: a descendant that left the process group holds the output of a program that
// succeeds. Its output is complete when the descendant ends; if that takes too long, nobody knows what
// it would have been, and the kernel has refused nothing.
func TestOutputThatStaysOpen(t *testing.T) {
	for _, c := range []struct {
		waits time.Duration
		holds string
		works bool
	}{{time.Minute, "0.5", true}, {100 * time.Millisecond, "5", false}} {
		left := filepath.Join(t.TempDir(), "left") // the group
		config := toolConfig{timeout: time.Minute, waitDelay: c.waits, dir: fakePrograms(t, "iptables v1.8.9 (nf_tables)",
			"cat >/dev/null; rm -f "+left+"; setsid -f sh -c 'touch "+left+"; sleep "+c.holds+"; echo late'; while ! [ -e "+left+" ]; do sleep 0.01; done")}
		program := filepath.Join(config.dir, "iptables-restore")
		o, err := config.run(t.Context(), 0, nil, program)
		if (err == nil) != c.works || strings.Contains(string(o.output), "late") != c.works {
			t.Errorf("a descendant for %s s: output %q, error %v, want all of it: %t", c.holds, o.output, err, c.works)
		}
		err = (&tool{config: config, programs: programs{restore: program}}).restore(t.Context(), nil)
		if _, refused := errors.AsType[*restoreError](err); (err == nil) != c.works || refused {
			t.Errorf("a descendant for %s s: restore = %v, want success: %t, and no refusal", c.holds, err, c.works)
		}
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// mustBeGone waits until the process group that a file names has no living member.
func mustBeGone(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var group int
	if _, err := fmt.Sscan(string(text), &group); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, fmt.Sprintf("the end of process group %d", group), func() bool { return living(t, group) == 0 })
}

// living counts the members of a process group that are not zombies.
func living(t *testing.T, group int) (n int) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, stat := range stats {
		text, err := os.ReadFile(stat)
		if err != nil {
			continue // the process has ended
		}
		var state string
		var parent, of int
		_, rest, _ := strings.Cut(string(text), ") ")
		if _, err := fmt.Sscan(rest, &state, &parent, &of); err == nil && of == group && state != "Z" {
			n++
		}
	}
	return n
}

func TestEndOfContextKillsTheProgram(t *testing.T) {
	c := toolConfig{lockWait: time.Second, timeout: time.Minute, dir: fakePrograms(t, "", "sleep 60")}
	tool := &tool{config: c, variant: VariantNFT, programs: programs{restore: filepath.Join(c.dir, "iptables-restore")}}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := tool.restore(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("restore = %v, want DeadlineExceeded", err)
	}
	cancel()
	if err := tool.restore(ctx, nil); err == nil {
		t.Error("restore after the end of ctx succeeds, want an error")
	}
}

func TestStderrIsBounded(t *testing.T) {
	c := toolConfig{timeout: time.Minute, dir: fakePrograms(t, "",
		"cat >/dev/null; echo line 7 failed >&2; i=0; while [ $i -lt 3000 ]; do echo 0123456789abcdef >&2; i=$((i+1)); done; exit 2")}
	tool := &tool{config: c, variant: VariantNFT, programs: programs{restore: filepath.Join(c.dir, "iptables-restore")}}
	var refused *restoreError
	if err := tool.restore(t.Context(), nil); !errors.As(err, &refused) {
		t.Fatalf("error = %v, want a restoreError", err)
	}
	if !slices.Equal(refused.Lines, []int{7}) || len(refused.Text) > maxStderr {
		t.Errorf("lines = %v, %d bytes, want [7], at most %d", refused.Lines, len(refused.Text), maxStderr)
	}
}

func TestProgramRunsInTheCLocale(t *testing.T) {
	t.Setenv("LC_ALL", "de_DE.UTF-8")
	c := toolConfig{timeout: time.Minute, lockFile: "/nowhere", dir: fakePrograms(t, "", `echo "$LC_ALL $XTABLES_LOCKFILE"`)}
	o, err := c.run(t.Context(), 0, nil, filepath.Join(c.dir, "iptables-restore"))
	if got, want := string(o.output), "C /nowhere\n"; err != nil || got != want {
		t.Errorf("environment = %q, %v, want %q", got, err, want)
	}
}

// The table has a rule as nft writes it, which iptables-nft-save does not print.
func TestForeignTableThatCannotBeSavedIsAnError(t *testing.T) {
	program, err := exec.LookPath("nft")
	if err != nil {
		t.Skipf("needs nft: %v", err)
	}
	c := testConfig(t, netnstest.New(t), VariantDetect, v1.IPv4Protocol)
	o, err := c.run(t.Context(), 0, []byte("table ip nat {\n chain foreign {\n masquerade\n }\n}\n"), program, "-f", "-")
	if err != nil || o.err != nil {
		t.Fatalf("%v, %v: %s", err, o.err, o.stderr)
	}
	mustOpenTool(t, c) // detection succeeds nevertheless
	c.variant = VariantNFT
	tool := mustOpenTool(t, c)
	if text, err := tool.save(t.Context(), "nat"); !errors.Is(err, errIncompatible) {
		t.Errorf("save = %q, %v, want errIncompatible", text, err)
	}
}

func TestStartOutsideOfAnyNamespaceFails(t *testing.T) {
	c := toolConfig{timeout: time.Minute, netNS: "/nowhere"}
	if _, err := c.run(t.Context(), 0, nil, "/bin/true"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("error = %v, want ENOENT", err)
	}
}
