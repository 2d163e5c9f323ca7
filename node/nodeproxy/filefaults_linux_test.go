package nodeproxy

import (
	"flag"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// fileFault is a fault of files that a proxy uses. begin and end are shell commands, in the mount
// namespace of the proxy; $state is its folder, $tools that of the programs of iptables.
type fileFault struct {
	name, begin, end string
	// says is in the log while the fault lasts: of a proxy that runs, and of one that starts.
	says, starting string
	// stops means that changes are not programmed meanwhile.
	stops bool
	// loses means that the fault destroys what the proxy has recorded.
	loses bool
	modes []string // nil: all
}

var allFileFaults = flag.Bool("filefaults.all", false, "test every fault of files, and not only some")

// someFileFaults is how many faults a mode gets by default, about.
const someFileFaults = 2

const iptablesLegacy = "iptables-legacy"

func fileFaults() []fileFault {
	kernelSettings := `mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys`
	return []fileFault{
		{
			name: "the state folder is read-only", begin: "mount --bind $state $state; mount -o remount,bind,ro $state", end: "umount -l $state",
			starting: "kernel settings will not be restored if this process ends: write record of kernel settings",
		},
		{
			name: "the state folder is full", begin: "cat /dev/zero >$state/fill 2>/dev/null || true", end: "rm $state/fill",
			starting: "no space left on device",
		},
		{name: "the lock of the socket is another file", begin: "rm $state/debug.sock.lock; touch $state/debug.sock.lock", end: "true"},
		{name: "the socket is another file", begin: "rm $state/debug.sock; touch $state/debug.sock", end: "rm $state/debug.sock", says: errRemoved.Error(), starting: "is a file, and no socket"},
		{
			name: "kernel settings are read-only", begin: kernelSettings, end: "umount -l /proc/sys",
			starting: "kernel setting stays at",
		},
		{
			name: "the lock of iptables is a folder", begin: "rm /run/xtables.lock; mkdir /run/xtables.lock", end: "rmdir /run/xtables.lock",
			says: "xtables.lock", starting: "xtables.lock", stops: true, modes: []string{iptablesLegacy},
		},
		{
			name: "the lock of iptables cannot be made", begin: "rm /run/xtables.lock; mount --bind /run /run; mount -o remount,bind,ro /run", end: "umount -l /run",
			says: "xtables.lock", starting: "xtables.lock", stops: true, modes: []string{iptablesLegacy},
		},
		{
			name: "the lock of iptables is another file", begin: "rm /run/xtables.lock; touch /run/xtables.lock", end: "true", modes: []string{iptablesLegacy},
		},
		{
			name: "the programs of iptables are gone", begin: "mount -t tmpfs tmpfs $tools", end: "umount -l $tools",
			says: "iptables", starting: "iptables", stops: true, modes: []string{"iptables", iptablesLegacy},
		},
		{
			name: "the programs of iptables are broken", begin: "mount -t tmpfs tmpfs $tools; for p in $programs; do echo >$tools/$p; chmod +x $tools/$p; done", end: "umount -l $tools",
			says: "iptables", starting: "iptables", stops: true, modes: []string{"iptables", iptablesLegacy},
		},
		{
			name: "the BPF file system is gone", begin: "mount -t tmpfs tmpfs $bpffs", end: "umount -l $bpffs",
			says: "is not a BPF file system", starting: "is not a BPF file system", modes: []string{"ebpf"},
		},
		{
			name: "the cgroup is gone", begin: "mount -t tmpfs tmpfs $cgroup", end: "umount -l $cgroup",
			starting: "is not a directory of cgroup v2", modes: []string{"ebpf"},
		},
		// The last two: the folder is no mount point afterwards.
		{
			name: "the state folder is gone", begin: "rm -rf $state/*; umount -l $state || true; rmdir $state", end: "true",
			says: errRemoved.Error(), loses: true,
		},
		{
			name: "the state folder is a file", begin: "rm -rf $state/*; umount -l $state || true; rmdir $state; touch $state", end: "rm $state",
			says: "not a directory", starting: "not a directory", loses: true,
		},
	}
}

// faulty is a node whose proxy has a mount namespace of its own.
type faulty struct {
	*starved

	name   string
	mounts string // the namespace
	tools  string
	before string // kernel settings
}

// newFaulty starts a process that keeps the mount namespace. It has folders of its own instead of
// /run and of the proxy's state, and the programs of one variant of iptables.
func newFaulty(s *starved, name string) *faulty {
	s.t.Helper()
	f := &faulty{starved: s, name: name, tools: s.t.TempDir(), before: s.sysctls()}
	variant := "nft"
	if name == iptablesLegacy {
		variant = "legacy"
	}
	for _, program := range iptablesPrograms() {
		family, part, _ := strings.Cut(program, "-")
		path, err := exec.LookPath(strings.TrimSuffix(family+"-"+variant+"-"+part, "-"))
		netnstest.Check(s.t, err)
		netnstest.Check(s.t, os.Symlink(path, filepath.Join(f.tools, program)))
	}
	keeper := exec.Command("unshare", "--mount", "sh", "-ec", `mount -t tmpfs -o size=64k,nr_inodes=8 tmpfs "$0"; mount -t tmpfs tmpfs /run; touch /run/xtables.lock; echo; exec sleep infinity`, f.state())
	ready, err := keeper.StdoutPipe()
	netnstest.Check(s.t, err)
	netnstest.Check(s.t, keeper.Start())
	s.t.Cleanup(func() { _ = keeper.Process.Kill(); _ = keeper.Wait() })
	_, err = ready.Read(make([]byte, 1))
	netnstest.Check(s.t, err)
	f.mounts = "--mount=/proc/" + strconv.Itoa(keeper.Process.Pid) + "/ns/mnt"
	return f
}

func iptablesPrograms() []string {
	return []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"}
}

func (f *faulty) state() string {
	const flag = "--state-dir="
	return strings.TrimPrefix(f.flags[slices.IndexFunc(f.flags, func(s string) bool { return strings.HasPrefix(s, flag) })], flag)
}

// shell runs commands in the mount namespace.
func (f *faulty) shell(commands string) {
	f.t.Helper()
	cmd := exec.CommandContext(f.t.Context(), "nsenter", f.mounts, "sh", "-ec", commands)
	cmd.Env = append(os.Environ(), "state="+f.state(), "tools="+f.tools, "programs="+strings.Join(iptablesPrograms(), " "))
	if f.sockets != nil {
		cmd.Env = append(cmd.Env, "bpffs="+f.sockets.bpffs, "cgroup="+f.sockets.cgroup)
	}
	var out []byte
	if err := f.node.Do(func() (err error) { out, err = cmd.CombinedOutput(); return err }); err != nil {
		f.t.Fatalf("%s: %v\n%s", commands, err, out)
	}
}

// start starts a proxy in the mount namespace, with a kernel setting to change: a timeout.
func (f *faulty) start(timeout string, more ...string) *proxyProcess {
	f.t.Helper()
	nsenter, err := exec.LookPath("nsenter")
	netnstest.Check(f.t, err)
	p := prepare(f.t, f.node, slices.Concat(f.flags, []string{"--conntrack-udp-timeout=" + timeout}, more)...)
	p.cmd.Args = append([]string{"nsenter", f.mounts}, p.cmd.Args...)
	p.cmd.Path = nsenter
	p.cmd.Env = append(p.cmd.Env, "PATH="+f.tools)
	p.run()
	return p
}

// TestFaultsOfFiles: while files of a proxy cannot be read, written or run, it says which, and goes
// on with all that does not need them. The node keeps what it has. When the fault ends, everything
// is programmed and recorded without another event. Each fault comes to a proxy that runs, and to
// one that starts. Without -filefaults.all, the test takes some of them by chance.
func TestFaultsOfFiles(t *testing.T) {
	t.Parallel()
	modes := descriptorModes()
	delete(modes, "nftables, from manifests")
	modes[iptablesLegacy] = modes["iptables"]
	eachStarved(t, modes, func(s *starved) {
		name := s.t.Name()[strings.LastIndex(s.t.Name(), "/")+1:]
		f := newFaulty(s, name)
		faults := slices.DeleteFunc(fileFaults(), func(fault fileFault) bool {
			return fault.modes != nil && !slices.Contains(fault.modes, f.name)
		})
		for i := range faults {
			if *allFileFaults || rand.IntN(len(faults)) < someFileFaults {
				f.test(&faults[i])
			}
		}
	})
}

func (f *faulty) test(fault *fileFault) {
	t := f.t
	t.Logf("%s", fault.name)
	p := f.start("77s")
	p.waitHealthy()
	f.expectSoon(f.server())

	f.shell(fault.begin)
	f.suffers(p, fault, fault.says)
	if f.sockets != nil { // no program goes on with old endpoints
		poll.Until(t, "a socket in the cgroup goes to "+f.server(), func() bool { return f.sockets.ask(f.pods[1], netip.MustParseAddrPort(vip4)) == f.server() })
	}
	f.shell(fault.end)
	f.recovers(p)
	f.answersSpctl()

	f.shell(fault.begin)
	p.kill()
	p = f.start("78s")
	f.suffers(p, fault, fault.starting)
	f.shell(fault.end)
	f.recovers(p)
	f.answersSpctl()
	poll.Until(t, fault.name+": the kernel setting is changed, and recorded", func() bool {
		files, _ := filepath.Glob(f.inside("sysctls-*.json"))
		if len(files) != 1 {
			return false
		}
		record, err := os.ReadFile(files[0])
		return err == nil && strings.Contains(string(record), `"new": "78"`) && strings.Contains(f.sysctls(), "udp_timeout = 78\n")
	})
	if err := p.signal(syscall.SIGTERM); err != nil {
		t.Errorf("%s: after SIGTERM: %v, want exit code 0", fault.name, err)
	}
	p = f.start("78s", "--cleanup")
	if p.wait(); p.err != nil {
		t.Errorf("%s: --cleanup: %v, want exit code 0", fault.name, p.err)
	}
	if diff := cmp.Diff(f.before, f.sysctls()); diff != "" && !fault.loses {
		t.Errorf("%s: settings after --cleanup (-want +got):\n%s", fault.name, diff)
	}
	if left, _ := os.ReadDir(f.inside("")); len(left) > 0 {
		t.Errorf("%s: --cleanup leaves %v, want nothing", fault.name, left)
	}
}

// inside is the path of a file in the proxy's folder from outside of its mount namespace.
func (f *faulty) inside(name string) string {
	pid := strings.Split(f.mounts, "/")[2]
	return filepath.Join("/proc", pid, "root", f.state(), name)
}

func (f *faulty) answersSpctl() {
	f.t.Helper()
	waitSocket(f.t, f.inside("debug.sock"))
}

// suffers changes the endpoint during a fault.
func (f *faulty) suffers(p *proxyProcess, fault *fileFault, says string) {
	f.t.Helper()
	had := f.server()
	f.change()
	if fault.stops {
		p.waitOutput(says)
		if got := f.ask(netip.MustParseAddrPort(vip4), netns.AskOptions{}); got != had {
			f.t.Errorf("%s: %s answers, want %s as before", fault.name, got, had)
		}
		return
	}
	f.expectSoon(f.server())
	if says != "" {
		p.waitOutput(says)
	}
}
