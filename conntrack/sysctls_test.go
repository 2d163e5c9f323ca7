package conntrack

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/serviceplane/serviceplane/proxier"
)

// TestWhatTheOptionsWantOfTheKernel: SYS-01 to SYS-08.
func TestWhatTheOptionsWantOfTheKernel(t *testing.T) {
	limited := func(limit, buckets int64) []setting {
		return []setting{{conntrackDir + "max", limit, true}, {hashSize, buckets, true}}
	}
	for rule, c := range map[string]struct {
		flags SysctlOptions
		cpus  int
		want  []setting
	}{
		"defaults": {defaults(), 2, append(limited(131072, 32768),
			setting{path: conntrackDir + "tcp_timeout_established", value: 86400}, setting{path: conntrackDir + "tcp_timeout_close_wait", value: 3600})},
		"SYS-01 per CPU":            {SysctlOptions{MaxPerCore: 32768, Min: 131072}, 8, limited(262144, 65536)},
		"SYS-01 too much":           {SysctlOptions{MaxPerCore: 32768, Min: 2 << 20}, 64, limited(1<<20, 1<<18)},
		"SYS-01 min is not bounded": {SysctlOptions{MaxPerCore: 1, Min: 2 << 20}, 64, limited(2<<20, 1<<19)},
		"SYS-08":                    {SysctlOptions{Min: 131072}, 8, nil},
		"accounting":                {SysctlOptions{Accounting: true}, 1, []setting{{path: conntrackDir + "acct", value: 1}}},
		"SYS-05 to SYS-07": {SysctlOptions{TCPBeLiberal: true, UDP: time.Minute, UDPStream: 3*time.Minute + 999*time.Millisecond}, 1, []setting{
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

// fakeKernel is a directory with the files of /proc and /sys.
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
	if err := os.MkdirAll(filepath.Join(k.root, "proc/thread-self/ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("net:[4026531840]", filepath.Join(k.root, "proc/thread-self/ns/net")); err != nil {
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
		if got, err := newSysctls(k.root, SysctlOptions{}).read(path); got != text || err != nil {
			k.t.Errorf("%s = %q, %v, want %q", path, got, err, text)
		}
	}
}

// run is one run of the program: it applies the options, or cleans up if there are none.
func (k *fakeKernel) run(wanted *SysctlOptions) ([]proxier.Condition, *observer.ObservedLogs) {
	k.t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	if wanted == nil {
		if err := k.instance("kube-proxy", SysctlOptions{Logger: zap.New(core)}).Restore(k.t.Context()); err != nil {
			k.t.Errorf("Restore = %v, want nil", err)
		}
		return nil, logs
	}
	o := *wanted
	o.Logger = zap.New(core)
	return k.instance("kube-proxy", o).Apply(k.t.Context()), logs
}

func (k *fakeKernel) instance(name string, o SysctlOptions) *sysctls {
	o.StateDir, o.Instance = k.state, name
	return newSysctls(k.root, o)
}

// defaults are kube-proxy's.
func defaults(changes ...func(*SysctlOptions)) SysctlOptions {
	o := SysctlOptions{MaxPerCore: 32768, Min: 131072, TCPEstablished: 24 * time.Hour, TCPCloseWait: time.Hour}
	for _, change := range changes {
		change(&o)
	}
	return o
}

func liberal(o *SysctlOptions) { o.TCPBeLiberal = true }

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
	flags := defaults(liberal)
	k.run(&flags)
	k.expect(map[string]string{limitPath: "163840", hashSize: "40960", establPath: "86400", liberalPath: "1"}) // 5 CPUs (SYS-10)
	k.run(nil)
	k.expect(machine())
	k.expectNoRecord()
	k.run(nil) // a second cleanup is not an error
}

// TestTheLimitIsOnlyRaised: W-26, and SYS-02.
func TestTheLimitIsOnlyRaised(t *testing.T) {
	k := newFakeKernel(t, machine())
	k.set(limitPath, "262144")
	k.set(hashSize, "65536")
	flags := defaults(func(o *SysctlOptions) { o.TCPEstablished, o.TCPCloseWait = 432000*time.Second, 0 })
	if conditions, logs := k.run(&flags); logs.Len() != 0 || len(conditions) != 0 {
		t.Errorf("conditions %v, logs %v, want none", conditions, logs.All())
	}
	k.expect(map[string]string{limitPath: "262144", hashSize: "65536"})
	k.expectNoRecord()
}

func TestTheLimitIsLoweredWhenAsked(t *testing.T) {
	k := newFakeKernel(t, machine())
	k.set(limitPath, "262144")
	wanted := defaults(func(o *SysctlOptions) { o.LowerMax = true })
	k.run(&wanted)
	k.expect(map[string]string{limitPath: "163840"})
	k.run(nil)
	k.expect(map[string]string{limitPath: "262144"})
}

func TestOptionsThatMakeNoSenseAreNamed(t *testing.T) {
	_, err := NewSysctls(SysctlOptions{MaxPerCore: -1, Min: -2, UDP: time.Millisecond, TCPCloseWait: -time.Second})
	if !errors.Is(err, proxier.ErrInvalidConfig) {
		t.Fatalf("NewSysctls = %v, want %v", err, proxier.ErrInvalidConfig)
	}
	for _, field := range []string{"MaxPerCore: -1", "Min: -2", "UDP: 1ms", "TCPCloseWait: -1s"} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("NewSysctls = %v, want %q in it", err, field)
		}
	}
}

func TestTheFirstOldValueWinsOverRestarts(t *testing.T) {
	k := newFakeKernel(t, machine())
	first, second := defaults(), defaults(func(o *SysctlOptions) { o.TCPEstablished, o.MaxPerCore = time.Hour, 65536 })
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
	flags := defaults()
	k.run(&flags)
	k.set(establPath, "7200")
	if _, logs := k.run(nil); logs.FilterMessageSnippet("another program").Len() != 1 {
		t.Errorf("logs %v, want a line about another program", logs.All())
	}
	want := machine()
	want[establPath] = "7200"
	k.expect(want)
	k.expectNoRecord()
}

// TestASettingThatIsNotWantedAnyMoreIsRestoredAtStart: W-26 for be_liberal.
func TestASettingThatIsNotWantedAnyMoreIsRestoredAtStart(t *testing.T) {
	k := newFakeKernel(t, machine())
	loose, strict := defaults(liberal), defaults()
	k.run(&loose)
	k.run(&strict)
	k.expect(map[string]string{liberalPath: "0", establPath: "86400"})
	k.run(nil)
	k.expect(machine())
}

// TestASettingThatCannotBeChangedIsACondition: W-26.
func TestASettingThatCannotBeChangedIsACondition(t *testing.T) {
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
	flags := defaults()
	conditions, _ := k.run(&flags)
	if len(conditions) != 3 {
		t.Errorf("conditions %v, want one for each of 3 settings", conditions)
	}
	for _, c := range conditions {
		if c.Type != proxier.ConditionKernelSettings || c.Since.IsZero() || !strings.Contains(c.Message, "/") {
			t.Errorf("condition %+v, want one about kernel settings that names the file", c)
		}
	}
	k.expect(map[string]string{limitPath: "163840"})
	k.run(nil)
	k.expect(map[string]string{limitPath: "65536"})
	k.expectNoRecord()
}

func TestAChangeThatFailedIsNotRecorded(t *testing.T) {
	k := newFakeKernel(t, machine())
	s := k.instance("kube-proxy", SysctlOptions{})
	s.prepare()
	before := []change{{Path: establPath, Old: "1", New: "2"}}
	if err := s.record.save(before); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(k.root, establPath)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	// It can be read but not written, as if it were removed in between.
	if err := os.Symlink("/proc/version", path); err != nil {
		t.Fatal(err)
	}
	s.apply([]setting{{path: establPath, value: 3}})
	if got, err := s.record.load(); !cmp.Equal(got, before) || err != nil {
		t.Errorf("record = %v, %v, want %v as before", got, err, before)
	}
	if len(s.conditions) != 1 {
		t.Errorf("conditions %v, want one", s.conditions)
	}
}

func TestInstancesHaveRecordsOfTheirOwn(t *testing.T) {
	k := newFakeKernel(t, machine())
	flags := defaults()
	k.run(&flags)
	other := k.instance("edge", SysctlOptions{})
	other.prepare()
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
	flags := defaults()
	conditions, _ := k.run(&flags)
	if !slices.ContainsFunc(conditions, func(c proxier.Condition) bool { return strings.Contains(c.Message, "will not be restored") }) {
		t.Errorf("conditions %v, want one about the record", conditions)
	}
	k.expect(map[string]string{establPath: "86400"})
}

func TestABrokenRecordIsAnErrorOfCleanUpOnly(t *testing.T) {
	k := newFakeKernel(t, machine())
	s := k.instance("kube-proxy", SysctlOptions{})
	s.prepare()
	if err := os.MkdirAll(k.state, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.record.path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.restore(); err == nil {
		t.Error("restore = nil, want an error about the record")
	}
	flags := defaults()
	k.run(&flags)
	k.expect(map[string]string{establPath: "86400"})
	if info, err := os.Stat(s.record.path); err != nil || info.Mode() != 0o600 {
		t.Errorf("record: %v, %v, want a file with mode 0600", info, err)
	}
}

// A record that cannot be written is written later, with the values before all processes.
func TestARecordThatCannotBeWrittenIsWrittenLater(t *testing.T) {
	move := func(from, to string) {
		t.Helper()
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		before     *SysctlOptions // of an earlier process
		begin, end func(k *fakeKernel, path string)
	}{
		"the place is a file": {
			begin: func(k *fakeKernel, _ string) {
				if err := os.WriteFile(k.state, nil, 0o600); err != nil {
					t.Fatal(err)
				}
			},
			end: func(k *fakeKernel, _ string) { move(k.state, k.state+".old") },
		},
		"an earlier record cannot be read": {
			before: &SysctlOptions{TCPEstablished: 2 * time.Hour},
			begin: func(_ *fakeKernel, path string) {
				move(path, path+".aside")
				if err := os.Mkdir(path, 0o700); err != nil {
					t.Fatal(err)
				}
			},
			end: func(_ *fakeKernel, path string) {
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
				move(path+".aside", path)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := newFakeKernel(t, machine())
			if c.before != nil {
				k.run(c.before)
			}
			s := k.instance("kube-proxy", defaults(liberal))
			s.prepare()
			c.begin(k, s.record.path)
			for range 2 { // the second time, nothing needs to be changed any more
				if conditions := s.Apply(t.Context()); len(conditions) == 0 || !strings.Contains(conditions[0].Message, k.state) {
					t.Errorf("conditions %v, want one that names %s", conditions, k.state)
				}
				k.expect(map[string]string{establPath: "86400", liberalPath: "1"})
			}
			c.end(k, s.record.path)
			if conditions := s.Apply(t.Context()); len(conditions) > 0 {
				t.Errorf("conditions %v afterwards, want none", conditions)
			}
			if left, err := filepath.Glob(k.state + "/*.new"); err != nil || len(left) > 0 {
				t.Errorf("left are %v, %v, want nothing", left, err)
			}
			k.run(nil)
			k.expect(machine())
			k.expectNoRecord()
		})
	}
}

func TestCPUsOfTheMachine(t *testing.T) {
	for text, want := range map[string]int{"0": 1, "0-3": 4, "0-1,4,6-7": 5} {
		k := newFakeKernel(t, map[string]string{"sys/devices/system/cpu/online": text})
		if got := newSysctls(k.root, SysctlOptions{}).cpus(); got != want {
			t.Errorf("%q: %d CPUs, want %d", text, got, want)
		}
	}
	for _, text := range []string{"", "x", "3-1", "0-"} {
		k := newFakeKernel(t, map[string]string{"sys/devices/system/cpu/online": text})
		if got := newSysctls(k.root, SysctlOptions{}).cpus(); got < 1 {
			t.Errorf("%q: %d CPUs, want those of the Go runtime", text, got)
		}
	}
}

func TestSettingsAreNotCreated(t *testing.T) {
	k := newFakeKernel(t, machine())
	s := newSysctls(k.root, SysctlOptions{})
	if err := s.write("proc/sys/new", "1"); err == nil {
		t.Error("write = nil, want an error")
	}
	if _, err := os.Stat(filepath.Join(k.root, "proc/sys/new")); !os.IsNotExist(err) {
		t.Errorf("stat = %v, want %v", err, fs.ErrNotExist)
	}
}
