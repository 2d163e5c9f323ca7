package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestWhatTheFlagsWantOfTheKernel: SYS-01 to SYS-08.
func TestWhatTheFlagsWantOfTheKernel(t *testing.T) {
	limited := func(limit, buckets int64) []setting {
		return []setting{{conntrackDir + "max", limit, true}, {hashSize, buckets, true}}
	}
	for rule, c := range map[string]struct {
		flags conntrack
		cpus  int
		want  []setting
	}{
		"defaults": {parse(t).conntrack, 2, append(limited(131072, 32768),
			setting{path: conntrackDir + "tcp_timeout_established", value: 86400}, setting{path: conntrackDir + "tcp_timeout_close_wait", value: 3600})},
		"SYS-01 per CPU":            {conntrack{maxPerCore: 32768, min: 131072}, 8, limited(262144, 65536)},
		"SYS-01 too much":           {conntrack{maxPerCore: 32768, min: 2 << 20}, 64, limited(1<<20, 1<<18)},
		"SYS-01 min is not bounded": {conntrack{maxPerCore: 1, min: 2 << 20}, 64, limited(2<<20, 1<<19)},
		"SYS-08":                    {conntrack{min: 131072}, 8, nil},
		"SYS-05 to SYS-07": {conntrack{beLiberal: true, udpTimeout: time.Minute, udpStream: 3*time.Minute + 999*time.Millisecond}, 1, []setting{
			{path: conntrackDir + "udp_timeout", value: 60},
			{path: conntrackDir + "udp_timeout_stream", value: 180},
			{path: conntrackDir + "tcp_be_liberal", value: 1},
		}},
	} {
		t.Run(rule, func(t *testing.T) {
			if diff := cmp.Diff(c.want, c.flags.settings(c.cpus), cmp.AllowUnexported(setting{})); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
		})
	}
}

// fakeKernel is a tree of files in place of /proc and /sys.
type fakeKernel struct {
	t           *testing.T
	root, state string
}

func newFakeKernel(t *testing.T, files map[string]string) *fakeKernel {
	t.Helper()
	k := &fakeKernel{t, t.TempDir(), filepath.Join(t.TempDir(), "state")}
	for path, text := range files {
		k.set(path, text)
	}
	if err := os.MkdirAll(filepath.Join(k.root, "proc/self/ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("net:[4026531840]", filepath.Join(k.root, "proc/self/ns/net")); err != nil {
		t.Fatal(err)
	}
	return k
}

func (k *fakeKernel) set(path, text string) {
	k.t.Helper()
	path = filepath.Join(k.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		k.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
		k.t.Fatal(err)
	}
}

func (k *fakeKernel) expect(want map[string]string) {
	k.t.Helper()
	for path, text := range want {
		if got, err := newSysctls(k.root, k.state, "x", zap.NewNop()).read(path); got != text || err != nil {
			k.t.Errorf("%s = %q, %v, want %q", path, got, err, text)
		}
	}
}

// run is one life of the program: apply, or clean up if there are no flags.
func (k *fakeKernel) run(flags *conntrack) *observer.ObservedLogs {
	k.t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	s := newSysctls(k.root, k.state, "kube-proxy", zap.New(core))
	if flags != nil {
		s.apply(flags.settings(s.cpus()))
	} else if err := s.restore(); err != nil {
		k.t.Errorf("restore = %v, want nil", err)
	}
	return logs
}

func (k *fakeKernel) expectNoRecord() {
	k.t.Helper()
	if _, err := os.Stat(k.state); !os.IsNotExist(err) {
		k.t.Errorf("state directory: %v, want it gone", err)
	}
}

const (
	limitPath   = conntrackDir + "max"
	establPath  = conntrackDir + "tcp_timeout_established"
	liberalPath = conntrackDir + "tcp_be_liberal"
)

func machine() map[string]string {
	return map[string]string{
		limitPath: "65536", hashSize: "16384", establPath: "432000", conntrackDir + "tcp_timeout_close_wait": "60",
		liberalPath: "0", "sys/devices/system/cpu/online": "0-3,8",
	}
}

func TestCleanUpRestoresWhatWasBefore(t *testing.T) {
	k := newFakeKernel(t, machine())
	flags := parse(t, "--conntrack-tcp-be-liberal").conntrack
	k.run(&flags)
	k.expect(map[string]string{limitPath: "163840", hashSize: "40960", establPath: "86400", liberalPath: "1"}) // 5 CPUs (SYS-10)
	k.run(nil)
	k.expect(machine())
	k.expectNoRecord()
	k.run(nil) // nothing to do is no error
}

// TestTheLimitIsOnlyRaised: W-26, and SYS-02.
func TestTheLimitIsOnlyRaised(t *testing.T) {
	k := newFakeKernel(t, machine())
	k.set(limitPath, "262144")
	k.set(hashSize, "65536")
	flags := parse(t, "--conntrack-tcp-timeout-established=432000s", "--conntrack-tcp-timeout-close-wait=0").conntrack
	if logs := k.run(&flags); logs.Len() != 0 {
		t.Errorf("logs %v, want none", logs.All())
	}
	k.expect(map[string]string{limitPath: "262144", hashSize: "65536"})
	k.expectNoRecord()
}

func TestTheFirstOldValueWinsOverRestarts(t *testing.T) {
	k := newFakeKernel(t, machine())
	first, second := parse(t).conntrack, parse(t, "--conntrack-tcp-timeout-established=1h", "--conntrack-max-per-core=65536").conntrack
	k.run(&first)
	k.run(&first)
	k.run(&second)
	k.expect(map[string]string{establPath: "3600", limitPath: "327680"})
	k.run(nil)
	k.expect(machine())
	k.expectNoRecord()
}

func TestWhatSomebodyElseHasChangedSinceStays(t *testing.T) {
	k := newFakeKernel(t, machine())
	flags := parse(t).conntrack
	k.run(&flags)
	k.set(establPath, "7200")
	if logs := k.run(nil); logs.FilterMessageSnippet("somebody else").Len() != 1 {
		t.Errorf("logs %v, want a line about somebody else", logs.All())
	}
	want := machine()
	want[establPath] = "7200"
	k.expect(want)
	k.expectNoRecord()
}

// TestASettingThatIsNotWantedAnyMoreIsRestoredAtStart: W-26 for be_liberal.
func TestASettingThatIsNotWantedAnyMoreIsRestoredAtStart(t *testing.T) {
	k := newFakeKernel(t, machine())
	liberal, strict := parse(t, "--conntrack-tcp-be-liberal").conntrack, parse(t).conntrack
	k.run(&liberal)
	k.run(&strict)
	k.expect(map[string]string{liberalPath: "0", establPath: "86400"})
	k.run(nil)
	k.expect(machine())
}

// TestASettingThatCannotBeChangedIsOneWarning: W-26.
func TestASettingThatCannotBeChangedIsOneWarning(t *testing.T) {
	files := machine()
	delete(files, establPath)
	files[conntrackDir+"tcp_timeout_close_wait"] = "never"
	k := newFakeKernel(t, files)
	// A directory in place of a file cannot be written, not even by root.
	if err := os.Remove(filepath.Join(k.root, hashSize)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(k.root, hashSize), 0o755); err != nil {
		t.Fatal(err)
	}
	flags := parse(t).conntrack
	if got := k.run(&flags).FilterLevelExact(zap.WarnLevel).Len(); got != 3 {
		t.Errorf("%d warnings, want one for each setting that is missing or strange: 3", got)
	}
	k.expect(map[string]string{limitPath: "163840"})
	k.run(nil)
	k.expect(map[string]string{limitPath: "65536"})
	k.expectNoRecord()
}

func TestAChangeThatFailedIsNotRecorded(t *testing.T) {
	k := newFakeKernel(t, machine())
	core, logs := observer.New(zap.WarnLevel)
	s := newSysctls(k.root, k.state, "kube-proxy", zap.New(core))
	before := []change{{Path: establPath, Old: "1", New: "2"}}
	if err := s.record.save(before); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(k.root, establPath)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	// It can be read, but not written: it goes in between.
	if err := os.Symlink("/proc/version", path); err != nil {
		t.Fatal(err)
	}
	s.apply([]setting{{path: establPath, value: 3}})
	if got, err := s.record.load(); !cmp.Equal(got, before) || err != nil {
		t.Errorf("record = %v, %v, want %v as before", got, err, before)
	}
	if logs.Len() != 1 {
		t.Errorf("logs %v, want one warning", logs.All())
	}
}

func TestInstancesHaveRecordsOfTheirOwn(t *testing.T) {
	k := newFakeKernel(t, machine())
	flags := parse(t).conntrack
	k.run(&flags)
	other := newSysctls(k.root, k.state, "edge", zap.NewNop())
	other.apply([]setting{{path: liberalPath, value: 1}})
	if got, want := filepath.Base(other.record.path), "sysctls-edge-4026531840.json"; got != want {
		t.Errorf("record %q, want %q", got, want)
	}
	k.run(nil)
	k.expect(map[string]string{establPath: "432000", liberalPath: "1"})
	if err := other.restore(); err != nil {
		t.Errorf("restore = %v, want nil", err)
	}
	k.expect(machine())
	k.expectNoRecord()
}

func TestWithoutAPlaceForTheRecordSettingsAreStillChanged(t *testing.T) {
	k := newFakeKernel(t, machine())
	k.state = "/proc/version/state"
	flags := parse(t).conntrack
	if got := k.run(&flags).FilterMessageSnippet("will not restore").Len(); got != 1 {
		t.Errorf("%d warnings about the record, want 1", got)
	}
	k.expect(map[string]string{establPath: "86400"})
}

func TestABrokenRecordIsAnErrorOfCleanUpOnly(t *testing.T) {
	k := newFakeKernel(t, machine())
	s := newSysctls(k.root, k.state, "kube-proxy", zap.NewNop())
	if err := os.MkdirAll(k.state, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.record.path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.restore(); err == nil {
		t.Error("restore = nil, want an error about the record")
	}
	flags := parse(t).conntrack
	k.run(&flags)
	k.expect(map[string]string{establPath: "86400"})
	if info, err := os.Stat(s.record.path); err != nil || info.Mode() != 0o600 {
		t.Errorf("record: %v, %v, want a file that is root's alone", info, err)
	}
}

func TestCPUsOfTheMachine(t *testing.T) {
	for text, want := range map[string]int{"0": 1, "0-3": 4, "0-1,4,6-7": 5} {
		k := newFakeKernel(t, map[string]string{"sys/devices/system/cpu/online": text})
		if got := newSysctls(k.root, k.state, "x", zap.NewNop()).cpus(); got != want {
			t.Errorf("%q: %d CPUs, want %d", text, got, want)
		}
	}
	for _, text := range []string{"", "x", "3-1", "0-"} {
		k := newFakeKernel(t, map[string]string{"sys/devices/system/cpu/online": text})
		if got := newSysctls(k.root, k.state, "x", zap.NewNop()).cpus(); got < 1 {
			t.Errorf("%q: %d CPUs, want those of the Go runtime", text, got)
		}
	}
}

func TestSettingsAreNotCreated(t *testing.T) {
	k := newFakeKernel(t, machine())
	s := newSysctls(k.root, k.state, "x", zap.NewNop())
	if err := s.write("proc/sys/new", "1"); err == nil {
		t.Error("write = nil, want an error")
	}
	if _, err := os.Stat(filepath.Join(k.root, "proc/sys/new")); !os.IsNotExist(err) {
		t.Errorf("stat = %v, want %v", err, fs.ErrNotExist)
	}
}
