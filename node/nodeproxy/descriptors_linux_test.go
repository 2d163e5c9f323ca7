package nodeproxy

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// outOfDescriptors is the kernel's text for EMFILE.
const outOfDescriptors = "too many open files"

// descriptorModes are proxies whose every descriptor is refused in turn.
func descriptorModes() map[string][]string {
	return map[string][]string{
		"nftables":                 {"--proxy-mode=nftables", "--nftables-min-sync-period=0", "--nftables-sync-period=200ms"},
		"nftables, from manifests": {"--proxy-mode=nftables", "--nftables-min-sync-period=0", "--nftables-sync-period=200ms", "--manifests"},
		"ebpf":                     {"--proxy-mode=ebpf", "--nftables-min-sync-period=0", "--nftables-sync-period=200ms", "--cluster-cidr=10.244.0.0/16,fd00:244::/32"},
		"iptables":                 {"--proxy-mode=iptables", "--iptables-min-sync-period=0", "--iptables-sync-period=200ms"},
		"userspace":                {"--proxy-mode=userspace", "--nftables-min-sync-period=0", "--nftables-sync-period=200ms", "--iptables-sync-period=200ms", "--iptables-min-sync-period=0"},
	}
}

// starved is a node whose proxy gets few descriptors.
type starved struct {
	*small

	flags   []string
	sockets *bpfWorld         // in mode ebpf
	write   func(text string) // changes objects
	pod     int               // the endpoint that the Service has
	dice    *rand.Rand
}

var descriptorSeed = flag.Uint64("descriptors.seed", 0, "the seed of what happens by chance; 0 for a new one")

// eachStarved runs a test for each of some modes.
func eachStarved(t *testing.T, modes map[string][]string, test func(s *starved)) {
	seed := *descriptorSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("again with -descriptors.seed=%d", seed)
	for name, flags := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &starved{small: newSmall(t), pod: 1, flags: append(flags, "--state-dir="+t.TempDir()), dice: rand.New(rand.NewPCG(seed, 0))}
			if name == "ebpf" {
				s.sockets = newBPFWorld(t)
				s.flags = append(s.flags, s.sockets.flags()...)
			}
			if last := len(flags) - 1; flags[last] == "--manifests" {
				d := newDirectory(t)
				s.flags[last] = "--manifests=" + d.path
				s.write = func(text string) { d.write("endpoints.yaml", text) }
			} else {
				listener, err := s.node.Listen(t.Context(), "tcp", "127.0.0.1:6443")
				netnstest.Check(t, err)
				api := apitest.New(t, apitest.Options{Listener: listener})
				s.flags = append(s.flags, "--kubeconfig="+api.Kubeconfig(t))
				s.write = func(text string) {
					for _, o := range objects(t, text) {
						api.Put(t, o.Value)
					}
				}
				s.write(thisNode + "---\n" + webService + "---\n" + webSlices(1))
			}
			test(s)
		})
	}
}

// change replaces the endpoint of the Service.
func (s *starved) change() {
	s.t.Helper()
	s.pod = 3 - s.pod
	s.write(webSlices(s.pod))
}

func (s *starved) server() string { return "pod-" + strconv.Itoa(s.pod) }

// serves reports whether all frontends lead to the endpoint.
func (s *starved) serves() bool {
	s.t.Helper()
	for _, to := range flows() {
		if s.ask(to, netns.AskOptions{Timeout: 200 * time.Millisecond}) != s.server() {
			return false
		}
	}
	return true
}

// recovers wants everything to be programmed without another event, now that the process has
// descriptors again.
func (s *starved) recovers(p *proxyProcess) {
	s.t.Helper()
	s.expectSoon(s.server())
	p.waitHealthy()
	if s.sockets == nil {
		return
	}
	poll.Until(s.t, "a socket is translated", func() bool {
		before := p.sample(translated4)
		return s.sockets.ask(s.pods[1], netip.MustParseAddrPort(vip4)) == s.server() && p.sample(translated4) > before
	})
}

// TestEachDescriptorOfAChange: the proxy may open no descriptor, then one, two and so on, until a
// change needs no more; a repair of flushed rules gets some number. Each time something fails, the log says it and the process goes on; when it may open more, everything is programmed
// without another event.
func TestEachDescriptorOfAChange(t *testing.T) {
	t.Parallel()
	eachStarved(t, descriptorModes(), func(s *starved) {
		p := start(s.t, s.node, s.flags...)
		p.waitHealthy()
		s.expectSoon(s.server())
		refused := 0
		for spare := 0; s.starve(p, spare, s.change); spare++ {
			refused++
		}
		s.t.Logf("%d descriptors of a change refused in turn", refused)
		// Repairs that follow each other are delayed, so one must do.
		s.starve(p, s.dice.IntN(refused+2), func() { s.nft("flush", "ruleset"); s.change() })
	})
}

// starve lets the process open few descriptors during an event, and reports whether it needed more.
func (s *starved) starve(p *proxyProcess, spare int, event func()) bool {
	s.t.Helper()
	before := strings.Count(p.stderr(), outOfDescriptors)
	fails := func() bool { return strings.Count(p.stderr(), outOfDescriptors) > before }
	p.limit(spare)
	event()
	poll.Until(s.t, fmt.Sprintf("with %d descriptors: programmed, or an error", spare), func() bool { return fails() || s.serves() })
	p.setLimit(manyDescriptors)
	s.recovers(p)
	return fails()
}

// limit lets the process open so many more descriptors than it has.
func (p *proxyProcess) limit(spare int) {
	p.t.Helper()
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
	netnstest.Check(p.t, err)
	used := map[string]bool{}
	for _, file := range open {
		used[file.Name()] = true
	}
	most := 0
	for ; spare > 0 || used[strconv.Itoa(most)]; most++ {
		if !used[strconv.Itoa(most)] {
			spare--
		}
	}
	p.setLimit(most)
}

// manyDescriptors are more than a process of these tests needs.
const manyDescriptors = 1 << 12

func (p *proxyProcess) setLimit(most int) {
	p.t.Helper()
	netnstest.Check(p.t, unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(most), Max: manyDescriptors}, nil))
}

// TestEachDescriptorOfAStart: a proxy that starts with too few descriptors says it, and ends or
// goes on. The node keeps what it has, and the next proxy that has enough programs everything.
func TestEachDescriptorOfAStart(t *testing.T) {
	t.Parallel()
	eachStarved(t, descriptorModes(), func(s *starved) {
		first := start(s.t, s.node, s.flags...)
		first.waitHealthy()
		s.expectSoon(s.server())
		first.kill()
		keeps := s.serves() // not in mode userspace
		ended, refused := 0, 0
		// With less, Go's runtime does not start.
		for most := 8 + s.dice.IntN(2); ; most += 1 + s.dice.IntN(3) {
			if refused == 0 || s.serves() { // the failed ones may have programmed it
				s.change()
			}
			p := startWithDescriptors(s.t, s.node, most, s.flags...)
			fails := func() bool { return strings.Contains(p.stderr(), outOfDescriptors) }
			poll.Until(s.t, fmt.Sprintf("start with %d descriptors: programmed, or an error", most), func() bool {
				return fails() || p.hasEnded() || s.serves()
			})
			if keeps {
				if got := s.ask(netip.MustParseAddrPort(vip4), netns.AskOptions{}); got != "pod-1" && got != "pod-2" {
					s.t.Errorf("with %d descriptors: %s answers, want a pod", most, got)
				}
			}
			if p.hasEnded() {
				ended++
				if code := p.cmd.ProcessState.ExitCode(); code != 1 || !fails() {
					s.t.Errorf("with %d descriptors: exit code %d, want 1 and %q", most, code, outOfDescriptors)
				}
			}
			p.kill()
			s.expectSameFindings(first, p)
			if !fails() {
				break
			}
			refused++
		}
		s.t.Logf("%d starts failed, of which %d ended by themselves", refused, ended)
		if refused == 0 {
			s.t.Error("no descriptor was refused")
		}
	})
}

// expectSameFindings wants a process that lacks descriptors to take nothing for missing, and to
// choose what another one has chosen. Otherwise rules of two variants would stay beside each other.
func (s *starved) expectSameFindings(one, starved *proxyProcess) {
	s.t.Helper()
	chosen := regexp.MustCompile(`"variant": "\w+"`)
	for line := range strings.Lines(starved.stderr()) {
		if strings.Contains(line, " is missing: ") || strings.Contains(line, "needs Linux") {
			s.t.Errorf("logged %q, want no lack of descriptors taken for something missing", line)
		}
		if got := chosen.FindString(line); got != "" && !strings.Contains(one.stderr(), got) {
			s.t.Errorf("chose %s, want what one with descriptors chose", got)
		}
	}
}

func (p *proxyProcess) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// startWithDescriptors starts the program as start does, with so many descriptors. It inherits none of
// whoever runs the tests.
func startWithDescriptors(tb testing.TB, ns *netns.NS, most int, args ...string) *proxyProcess {
	tb.Helper()
	p := prepare(tb, ns, args...)
	p.cmd.Args = append([]string{"sh", "-c", `exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- && ulimit -n "$0" && exec "$@"`, strconv.Itoa(most)}, p.cmd.Args...)
	path, err := exec.LookPath("sh")
	netnstest.Check(tb, err)
	p.cmd.Path = path
	p.run()
	return p
}
