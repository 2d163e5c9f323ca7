package iptables

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

func TestDetectionPrefersTheVariantInUse(t *testing.T) {
	cases := map[string]struct {
		nft, legacy []string
		want        Variant
	}{
		"nothing": {want: VariantNFT}, // that of the fake program iptables
		"nft rules": {
			nft: []string{"*nat", ":A - [0:0]", "COMMIT"}, want: VariantNFT,
		},
		"legacy rules": {
			legacy: []string{"*nat", ":A - [0:0]", "COMMIT"}, want: VariantLegacy,
		},
		"more legacy rules": {
			nft:    []string{"*nat", ":A - [0:0]", "COMMIT"},
			legacy: []string{"*filter", ":A - [0:0]", "-A A -j RETURN", "COMMIT"}, want: VariantLegacy,
		},
		"hint in nft, more in legacy": {
			nft:    []string{"*mangle", ":KUBE-IPTABLES-HINT - [0:0]", "COMMIT"},
			legacy: []string{"*filter", ":A - [0:0]", "-A A -j RETURN", "COMMIT"}, want: VariantNFT,
		},
		"hint in legacy, more in nft": {
			nft:    []string{"*filter", ":A - [0:0]", "-A A -j RETURN", "COMMIT"},
			legacy: []string{"*mangle", ":KUBE-KUBELET-CANARY - [0:0]", "COMMIT"}, want: VariantLegacy,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			config := testConfig(t, netnstest.New(t), VariantDetect, v1.IPv4Protocol)
			for v, lines := range map[Variant][]string{VariantNFT: c.nft, VariantLegacy: c.legacy} {
				if lines != nil {
					config.variant = v
					mustRestore(t, mustOpenTool(t, config), lines...)
				}
			}
			config.variant = VariantDetect
			config.dir = t.TempDir()
			linkPrograms(t, config.dir, "iptables-nft", "iptables-legacy")
			fake(t, config.dir, "iptables", "echo 'iptables v1.8.9 (nf_tables)'")
			if got := mustOpenTool(t, config).variant; got != c.want {
				t.Errorf("variant = %q, want %q", got, c.want)
			}
		})
	}
}

func TestDetectionUsesTheProgramLast(t *testing.T) {
	c := testConfig(t, netnstest.New(t), VariantDetect, v1.IPv4Protocol)
	c.dir = t.TempDir()
	linkPrograms(t, c.dir, "iptables-nft", "iptables-legacy")
	fake(t, c.dir, "iptables", "echo 'iptables v1.8.9 (legacy)'")
	if got := mustOpenTool(t, c).variant; got != VariantLegacy {
		t.Errorf("variant = %q, want that of the program iptables, legacy", got)
	}
}

// TestDetectionFindsInstalledPrograms: a Provider of both families syncs with the programs
// of one variant in PATH, with or without the variant in their names; without any, the error
// names what is missing.
func TestDetectionFindsInstalledPrograms(t *testing.T) {
	for name, c := range map[string]struct {
		of   Variant // "" for no program at all
		bare bool
	}{
		"legacy only": {of: VariantLegacy}, "nft only": {of: VariantNFT}, "none": {},
		"legacy as iptables": {VariantLegacy, true}, "nft as iptables": {VariantNFT, true},
	} {
		t.Run(name, func(t *testing.T) {
			w, dir := &world{t, netnstest.New(t), VariantDetect, proxier.DefaultNames()}, t.TempDir()
			for _, family := range []string{"iptables", "ip6tables"} {
				switch {
				case c.bare:
					for _, kind := range []string{"", "-restore", "-save"} {
						link(t, family+"-"+string(c.of)+kind, filepath.Join(dir, family+kind))
					}
				case c.of != "":
					linkPrograms(t, dir, family+"-"+string(c.of))
				}
			}
			path := os.Getenv("PATH")
			t.Setenv("PATH", dir)
			p, stop := w.start()
			add(p, 0, 2)
			p.OnServiceSynced()
			p.OnEndpointSlicesSynced()
			err := p.Sync(t.Context())
			stop()
			t.Setenv("PATH", path)
			if c.of == "" {
				text := fmt.Sprint(err)
				if !errors.Is(err, proxier.ErrNotSupported) || !strings.Contains(text, "iptables-nft-restore") || !strings.Contains(text, "iptables-legacy-restore") {
					t.Errorf("sync = %v, want ErrNotSupported with the programs of both variants", err)
				}
				return
			}
			if err != nil {
				t.Fatalf("sync = %v, want nil", err)
			}
			if w.variant = c.of; !strings.Contains(w.save(), "test/web-1") {
				t.Errorf("rules of variant %s are\n%swant the Services in them", c.of, w.save())
			}
		})
	}
}

// linkPrograms puts the machine's programs into dir.
func linkPrograms(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		for _, program := range []string{name, name + "-restore", name + "-save"} {
			link(t, program, filepath.Join(dir, program))
		}
	}
}

func link(t *testing.T, program, as string) {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("needs iptables: %v", err)
	}
	if err := os.Symlink(path, as); err != nil {
		t.Fatal(err)
	}
}

// fake makes a program of a shell script.
func fake(t *testing.T, dir, name, body string) {
	t.Helper()
	// Written under another name: a file that is open for writing cannot run.
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path+".new", []byte("#!/bin/sh\n"+body+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func TestMissingProgramIsNotSupported(t *testing.T) {
	for _, v := range []Variant{VariantNFT, VariantLegacy} {
		c := toolConfig{family: v1.IPv6Protocol, variant: v, timeout: time.Minute, dir: t.TempDir()}
		_, err := openTool(t.Context(), c)
		var unsupported *proxier.UnsupportedError
		if !errors.As(err, &unsupported) || !errors.Is(err, proxier.ErrNotSupported) {
			t.Fatalf("error = %v, want an UnsupportedError", err)
		}
		if want := "ip6tables-" + string(v) + "-restore"; unsupported.Feature != want || unsupported.Hint != "install package iptables" {
			t.Errorf("error = %+v, want feature %s", unsupported, want)
		}
	}
}

// fakePrograms are three programs without a variant in their names.
func fakePrograms(t *testing.T, version, restore string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	fake(t, dir, "iptables", "echo '"+version+"'")
	fake(t, dir, "iptables-restore", restore)
	fake(t, dir, "iptables-save", "exit 0")
	return dir
}

func TestProgramWithoutVariantInItsNameIsFound(t *testing.T) {
	for version, want := range map[string]Variant{
		"iptables v1.8.9 (nf_tables)": VariantNFT,
		"iptables v1.8.9 (legacy)":    VariantLegacy,
		"iptables v1.6.2":             VariantLegacy,
	} {
		c := toolConfig{family: v1.IPv4Protocol, timeout: time.Minute, dir: fakePrograms(t, version, "exit 0")}
		for _, v := range []Variant{VariantNFT, VariantLegacy} {
			_, err := c.find(t.Context(), v)
			if got := err == nil; got != (v == want) {
				t.Errorf("%s: found for variant %s: %v (%v), want %v", version, v, got, err, v == want)
			}
		}
	}
}

// TestAProgramThatFailsIsNotMissing: without descriptors, memory or time, a program tells nothing
// about what is installed. The other variant may not be chosen instead.
func TestAProgramThatFailsIsNotMissing(t *testing.T) {
	for name, body := range map[string]string{
		"does not start":    "", // its interpreter is not there
		"lacks a library":   "exit 127",
		"is killed":         "kill -9 $$",
		"hangs":             "sleep 60",
		"prints no version": "echo hello",
	} {
		t.Run(name, func(t *testing.T) {
			config := toolConfig{timeout: time.Second, netNS: netnstest.New(t).Path()}
			for family, named := range map[v1.IPFamily]string{v1.IPv4Protocol: "iptables", v1.IPv6Protocol: "ip6tables"} {
				config.family = family
				for _, program := range []string{named + "-nft", "iptables"} {
					config.dir = t.TempDir()
					linkPrograms(t, config.dir, named+"-nft", named+"-legacy")
					broken := filepath.Join(config.dir, program)
					_ = os.Remove(broken) // not what the link names
					if fake(t, config.dir, program, body); body == "" {
						netnstest.Check(t, os.WriteFile(broken, []byte("#!/nowhere\n"), 0o700))
					}
					found, err := config.detect(t.Context())
					if err == nil || errors.Is(err, proxier.ErrNotSupported) || !strings.Contains(err.Error(), program) {
						t.Errorf("%s, %s: detect = %+v, %v, want an error that names it, not ErrNotSupported", family, program, found, err)
					}
				}
			}
		})
	}
}

// TestARuleWithoutMemoryIsNotMissing plays the messages of the programs of iptables 1.8.9.
func TestARuleWithoutMemoryIsNotMissing(t *testing.T) {
	for text, missing := range map[string]bool{
		"line 4: RULE_APPEND failed (Cannot allocate memory): rule in chain X":    false,
		"line 4: RULE_APPEND failed (No buffer space available): rule in chain X": false,
		"line 4 failed: Memory allocation problem.":                               false,
		"iptables-nft-restore: can't alloc memory!":                               false,
		"Could not fetch rule set generation id: Too many open files":             false,
		"line 4: RULE_APPEND failed (No such file or directory): rule in chain X": true,
		"line 4 failed: No chain/target/match by that name.":                      true,
		"line 4 failed": true,
	} {
		for _, v := range []Variant{VariantNFT, VariantLegacy} {
			for family, named := range map[v1.IPFamily]string{v1.IPv4Protocol: "iptables", v1.IPv6Protocol: "ip6tables"} {
				c := testConfig(t, netnstest.New(t), v, family)
				c.dir = t.TempDir()
				fake(t, c.dir, named, "echo 'iptables v1.8.9 ("+map[Variant]string{VariantNFT: "nf_tables", VariantLegacy: "legacy"}[v]+")'")
				fake(t, c.dir, named+"-restore", `case "$(cat)" in *"-A "*) echo "`+text+`" >&2; exit 4;; esac`)
				fake(t, c.dir, named+"-save", "exit 0")
				_, err := openTool(t.Context(), c)
				if err == nil || errors.Is(err, proxier.ErrNotSupported) != missing {
					t.Errorf("%s, %s, %q: error = %v, want ErrNotSupported: %t", v, family, text, err, missing)
				}
			}
		}
	}
}

func TestOldVersionIsRefused(t *testing.T) {
	for version, old := range map[string]bool{
		"iptables v1.4.21": true, "iptables v1.6.1": true, "iptables v1.6": true,
		"iptables v1.6.2": false, "iptables v1.10.0 (legacy)": false,
	} {
		c := toolConfig{family: v1.IPv4Protocol, timeout: time.Minute, dir: fakePrograms(t, version, "exit 0")}
		found, err := c.find(t.Context(), VariantLegacy)
		if err != nil {
			t.Fatalf("%s: %v", version, err)
		}
		err = found.checkVersion()
		if got := errors.Is(err, proxier.ErrNotSupported); got != old {
			t.Errorf("%s: refused: %v (%v), want %v", version, got, err, old)
		}
	}
}

func TestMissingFeatureIsNamed(t *testing.T) {
	// This restore refuses what the kernel of a test machine has.
	dir := fakePrograms(t, "iptables v1.8.9 (nf_tables)",
		`if grep -q -e "-m recent" -e "-j REJECT"; then echo "line 3: RULE_APPEND failed (No such file or directory)" >&2; exit 4; fi`)
	_, err := openTool(t.Context(), toolConfig{family: v1.IPv4Protocol, variant: VariantNFT, timeout: time.Minute, dir: dir})
	if !errors.Is(err, proxier.ErrNotSupported) {
		t.Fatalf("error = %v, want ErrNotSupported", err)
	}
	for _, want := range []string{"recent", "xt_recent", "REJECT", "ipt_REJECT"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error = %v, want %q in it", err, want)
		}
	}
	if strings.Contains(err.Error(), "statistic") {
		t.Errorf("error = %v, want no feature that exists", err)
	}
}

// TestFeatureThatIsBeingLoadedIsNotMissing: the kernel refuses a module's rule until the
// module works.
func TestFeatureThatIsBeingLoadedIsNotMissing(t *testing.T) {
	refusal := `{ echo "line 3: RULE_APPEND failed (No such file or directory)" >&2; exit 4; }`
	for name, c := range map[string]struct {
		restore string
		want    string
	}{
		"the first time":       {`mkdir ` + filepath.Join(t.TempDir(), "seen") + ` 2>/dev/null && ` + refusal + `; exit 0`, ""},
		"only with the others": {`[ "$(grep -c SCRATCH)" -gt 4 ] && ` + refusal + `; exit 0`, "try features of table filter"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := fakePrograms(t, "iptables v1.8.9 (nf_tables)", c.restore)
			_, err := openTool(t.Context(), toolConfig{family: v1.IPv4Protocol, variant: VariantNFT, timeout: time.Minute, dir: dir})
			if c.want == "" && err != nil {
				t.Errorf("openTool = %v, want nil", err)
			}
			if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("openTool = %v, want %q", err, c.want)
			}
		})
	}
}
