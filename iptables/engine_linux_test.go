package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a namespace with a Provider of one variant.
type world struct {
	t       *testing.T
	ns      *netns.NS
	variant Variant
	names   proxier.Names
}

// everyVariant runs a test with both variants, and names of both kinds.
func everyVariant(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		for _, names := range []proxier.Names{proxier.KubeProxyNames(), proxier.DefaultNames()} {
			t.Run(string(variant)+"/"+names.Instance, func(t *testing.T) {
				test(t, &world{t, netnstest.New(t), variant, names})
			})
		}
	}
}

func (w *world) config() Config {
	return Config{
		Config: proxier.Config{
			NetNS: w.ns.Path(), Names: w.names, Runner: runner.Options{MinInterval: runner.Unlimited},
			Masquerade: proxier.Masquerade{PodCIDRs: []netip.Prefix{
				netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32"),
			}},
		},
		Variant: w.variant, LocalhostNodePorts: true,
	}
}

// start makes a Provider run until the test ends, or stop is called.
func (w *world) start(change ...func(*Config)) (p *proxier.Proxier, stop func()) {
	w.t.Helper()
	config := w.config()
	for _, c := range change {
		c(&config)
	}
	p, err := New(config, proxier.Deps{Health: proxier.NoHealth()})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	running := true
	stop = func() {
		if running {
			running = false
			cancel()
			if err := <-ended; err != nil {
				w.t.Errorf("Run = %v, want nil", err)
			}
		}
	}
	w.t.Cleanup(stop)
	return p, stop
}

// startWith makes one run that knows some Services from the beginning.
func (w *world) startWith(services func(p *proxier.Proxier), change ...func(*Config)) (p *proxier.Proxier, stop func()) {
	w.t.Helper()
	p, stop = w.start(change...)
	services(p)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	w.sync(p)
	return p, stop
}

func some(n int) func(*proxier.Proxier) {
	return func(p *proxier.Proxier) { add(p, 0, n) }
}

// run runs a program in the namespace.
func (w *world) run(name string, args ...string) string {
	w.t.Helper()
	var out []byte
	netnstest.Check(w.t, w.ns.Do(func() (err error) {
		out, err = exec.Command(name, args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s %v: %w: %s", name, args, err, out)
		}
		return nil
	}))
	return string(out)
}

func (w *world) iptables(args ...string) string {
	w.t.Helper()
	return w.run("iptables-"+string(w.variant), append([]string{"-w"}, args...)...)
}

// save is what both tables of both families hold, without counters and times.
func (w *world) save() string {
	w.t.Helper()
	text := ""
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, table := range []string{"nat", "filter"} {
			for line := range strings.Lines(w.run(program+"-"+string(w.variant)+"-save", "-t", table)) {
				if !strings.HasPrefix(line, "#") {
					text += strings.TrimRight(strings.Split(line, " [")[0], "\n") + "\n"
				}
			}
		}
	}
	return text
}

// add gives the Provider some Services of all kinds.
func add(p *proxier.Proxier, from, to int) {
	for i := from; i < to; i++ {
		name := fmt.Sprintf("web-%d", i)
		options := []proxiertest.ServiceOption{
			proxiertest.ClusterIPs(fmt.Sprintf("10.96.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:96::%x", i)),
			proxiertest.NodePort("http", v1.ProtocolTCP, 80, int32(30000+2*i)), proxiertest.NodePort("dns", v1.ProtocolUDP, 53, int32(30001+2*i)),
			proxiertest.ExternalIPs(fmt.Sprintf("198.18.%d.%d", i>>8, i&255)), proxiertest.LoadBalancer(fmt.Sprintf("198.19.%d.%d", i>>8, i&255)),
		}
		switch i % 4 {
		case 1:
			options = append(options, proxiertest.ExternalPolicyLocal(), proxiertest.InternalPolicyLocal())
		case 2:
			options = append(options, proxiertest.SourceRanges("192.0.2.0/24", "2001:db8::/32"), proxiertest.ClientAffinity(time.Hour))
		}
		p.OnServiceAdd(proxiertest.Service("test", name, options...))
		if i%5 != 4 {
			p.OnEndpointSliceAdd(slice(name, discovery.AddressTypeIPv4, endpoints4(i, 1+i%20)...))
			p.OnEndpointSliceAdd(slice(name, discovery.AddressTypeIPv6, fmt.Sprintf("fd00:244::%x", i+1)))
		}
	}
}

func endpoints4(service, n int) []string {
	addrs := make([]string, n)
	for i := range addrs {
		addrs[i] = fmt.Sprintf("10.244.%d.%d", service&255, 2+i)
	}
	return addrs
}

func slice(service string, family discovery.AddressType, addrs ...string) *discovery.EndpointSlice {
	options := []proxiertest.SliceOption{
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.SlicePort("dns", v1.ProtocolUDP, 5353),
	}
	for _, addr := range addrs {
		options = append(options, proxiertest.Endpoint(addr))
	}
	return proxiertest.Slice("test", service, family, options...)
}

func (w *world) sync(p *proxier.Proxier) {
	w.t.Helper()
	if err := p.Sync(w.t.Context()); err != nil {
		w.t.Fatalf("sync: %v", err)
	}
}

// lastWrites is how much the last sync of each family wrote.
func lastWrites(p *proxier.Proxier) map[v1.IPFamily]proxier.SyncReport {
	last := map[v1.IPFamily]proxier.SyncReport{}
	for _, r := range p.History() {
		last[r.Family] = r
	}
	return last
}

// TestWhatIsThereIsNotWrittenAgain: what the programs print is what was written, so
// that a full sync, and a restart, find nothing to do.
func TestWhatIsThereIsNotWrittenAgain(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		_, stop := w.startWith(some(40))
		before := w.save()
		stop()
		p, _ := w.startWith(some(40))
		for _, r := range p.History() {
			if r.Apply.Writes != 0 {
				t.Errorf("%s: a restart wrote %d rules and chains, full %v, want 0", r.Family, r.Apply.Writes, r.Full)
			}
		}
		if diff := gocmp.Diff(before, w.save()); diff != "" {
			t.Errorf("rules (-before +after a restart):\n%s", diff)
		}
	})
}

// TestChangesAddUp: a history of partial syncs leaves what a full one would write.
func TestChangesAddUp(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		p, stop := w.startWith(some(30))
		add(p, 30, 60)
		w.sync(p)
		for i := 10; i < 45; i++ {
			p.OnServiceDelete(proxiertest.Service("test", fmt.Sprintf("web-%d", i)))
		}
		w.sync(p)
		for i := range 10 {
			p.OnEndpointSliceAdd(slice(fmt.Sprintf("web-%d", i), discovery.AddressTypeIPv4, endpoints4(i, 20-i)...))
		}
		w.sync(p)
		for family, r := range lastWrites(p) {
			if r.Full {
				t.Errorf("%s: the last sync is full, want a partial one", family)
			}
		}
		partial := w.save()
		stop()
		other := &world{t, netnstest.New(t), w.variant, w.names}
		q, _ := other.startWith(some(10))
		add(q, 45, 60)
		for i := range 10 {
			q.OnEndpointSliceAdd(slice(fmt.Sprintf("web-%d", i), discovery.AddressTypeIPv4, endpoints4(i, 20-i)...))
		}
		for i := 10; i < 45; i++ { // whose endpoints were left
			if i%5 != 4 {
				q.OnEndpointSliceAdd(slice(fmt.Sprintf("web-%d", i), discovery.AddressTypeIPv4, endpoints4(i, 1+i%20)...))
			}
		}
		other.sync(q)
		if diff := gocmp.Diff(other.save(), partial); diff != "" {
			t.Errorf("rules (-from scratch +by changes):\n%s", diff)
		}
	})
}

// bytesWritten is what all syncs of IPv4 since then have written. There may be more
// of them than were asked for.
func bytesWritten(p *proxier.Proxier, since time.Time) (sum int) {
	for _, r := range p.History() {
		if r.Family == v1.IPv4Protocol && r.Started.After(since) {
			sum += r.Apply.Bytes
		}
	}
	return sum
}

// TestAOneEndpointChangeWritesLittle.
func TestAOneEndpointChangeWritesLittle(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		p, _ := w.startWith(some(200))
		whole, before := bytesWritten(p, time.Time{}), time.Now()
		p.OnEndpointSliceAdd(slice("web-8", discovery.AddressTypeIPv4, append(endpoints4(8, 8), "10.244.99.99")...))
		w.sync(p)
		if one := bytesWritten(p, before); one == 0 || one*50 > whole {
			t.Errorf("one endpoint: %d bytes of %d, want 2 in 100 at most", one, whole)
		}
	})
}

// TestDamageIsRepairedSoon, within two seconds and a bit of notice, and the rules of
// others are left as they are, in their order.
func TestDamageIsRepairedSoon(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		w.iptables("-t", "nat", "-A", "OUTPUT", "-d", "192.0.2.99/32", "-m", "comment", "--comment", "of somebody else", "-j", "RETURN")
		w.iptables("-N", "FOREIGN")
		w.iptables("-A", "FORWARD", "-j", "FOREIGN")
		p, _ := w.startWith(some(20))
		before := w.save()
		n := chainNames{w.names.ChainPrefix}
		for damage, do := range map[string]func(){
			"a chain is flushed":      func() { w.iptables("-t", "nat", "-F", n.services()) },
			"a rule is deleted":       func() { w.iptables("-t", "nat", "-D", n.postrouting(), "1") },
			"a jump is deleted":       func() { w.iptables("-t", "nat", "-D", "OUTPUT", "1") },
			"a filter jump is gone":   func() { w.iptables("-D", "INPUT", "1") },
			"a rule of ours is added": func() { w.iptables("-t", "nat", "-A", n.mark(), "-j", "RETURN") },
		} {
			began := time.Now()
			do() // may be repaired before anybody else can look
			if !poll.Soon(func() bool { return bytesWritten(p, began) > 0 && w.save() == before }) {
				t.Fatalf("%s (-before +now):\n%s", damage, gocmp.Diff(before, w.save()))
			}
			t.Logf("%s: repaired after %v", damage, time.Since(began).Round(10*time.Millisecond))
		}
	})
}

// TestCleanupLeavesWhatIsNotOurs, in both variants, byte for byte.
func TestCleanupLeavesWhatIsNotOurs(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		w.iptables("-t", "nat", "-N", "KUBE-HOSTPORTS")
		w.iptables("-t", "nat", "-A", "PREROUTING", "-m", "comment", "--comment", "host ports", "-j", "KUBE-HOSTPORTS")
		w.iptables("-N", "KUBE-FIREWALL")
		w.iptables("-A", "INPUT", "-j", "KUBE-FIREWALL")
		w.iptables("-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
		before := w.save()
		p, stop := w.startWith(some(20))
		stop()
		if w.save() == before {
			t.Fatal("nothing was programmed")
		}
		localnet := func() (text string) {
			netnstest.Check(t, w.ns.Do(func() error {
				b, err := os.ReadFile(routeLocalnet)
				text = strings.TrimSpace(string(b))
				return err
			}))
			return text
		}
		if got := localnet(); got != "1" {
			t.Errorf("route_localnet = %s, want 1", got)
		}
		if err := p.Cleanup(t.Context()); err != nil {
			t.Errorf("Cleanup = %v, want nil", err)
		}
		if diff := gocmp.Diff(before, w.save()); diff != "" {
			t.Errorf("rules (-before +after clean-up):\n%s", diff)
		}
		if got := localnet(); got != "0" {
			t.Errorf("route_localnet = %s after clean-up, want 0", got)
		}
		if err := p.Cleanup(t.Context()); err != nil {
			t.Errorf("a second Cleanup = %v, want nil", err)
		}
	})
}

// TestAPredecessorIsTakenOver: kube-proxy's own chains and jumps go, and what
// leads to chains that we have too stays in its place.
func TestAPredecessorIsTakenOver(t *testing.T) {
	for _, variant := range []Variant{VariantNFT, VariantLegacy} {
		t.Run(string(variant), func(t *testing.T) {
			w := &world{t, netnstest.New(t), variant, proxier.KubeProxyNames()}
			for _, chain := range []string{"KUBE-EXTERNAL-SERVICES", "KUBE-PROXY-FIREWALL", "KUBE-SERVICES"} {
				w.iptables("-N", chain)
				w.iptables("-A", "INPUT", "-m", "conntrack", "--ctstate", "NEW", "-m", "comment", "--comment", "kubernetes load balancer firewall", "-j", chain)
			}
			w.iptables("-A", "INPUT", "-p", "tcp", "-m", "tcp", "--dport", "22", "-j", "ACCEPT")
			w.iptables("-t", "mangle", "-N", "KUBE-PROXY-CANARY")
			w.iptables("-t", "nat", "-N", "KUBE-SVC-OLDOLDOLDOLDOLDO")
			w.startWith(some(3))
			got := w.iptables("-S", "INPUT")
			if n := strings.Count(got, "-j KUBE-SERVICES\n"); n != 1 || strings.Contains(got, "FIREWALL") || strings.Contains(got, "EXTERNAL") || !strings.HasSuffix(got, "--dport 22 -j ACCEPT\n") {
				t.Errorf("INPUT is\n%swant one jump to KUBE-SERVICES, none to what only kube-proxy has, and the other rule last", got)
			}
			if text := w.save(); strings.Contains(text, "OLDOLD") || strings.Contains(text, "KUBE-PROXY-FIREWALL") {
				t.Errorf("chains of the predecessor are left:\n%s", text)
			}
		})
	}
}

// startOdd makes a Provider of IPv4 run whose programs are odd in some way.
func (w *world) startOdd(odd toolConfig) *proxier.Proxier {
	w.t.Helper()
	config := w.config().WithDefaults()
	config.Families = []v1.IPFamily{v1.IPv4Protocol}
	e, err := NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		w.t.Fatal(err)
	}
	odd.family, odd.netNS, odd.variant = v1.IPv4Protocol, config.NetNS, w.variant
	odd.lockWait, odd.timeout = cmp.Or(odd.lockWait, config.LockWait), cmp.Or(odd.timeout, config.Timeout)
	e.open = func(ctx context.Context) (kernel, error) { return openTool(ctx, odd) }
	p, err := proxier.New(config.Config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: e})
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("Run = %v, want nil", err)
		}
	})
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return p
}

// TestALockThatSomebodyHolds makes syncs fail one after the other, and never two at
// once; Status says since when; and soon after its release everything is programmed.
func TestALockThatSomebodyHolds(t *testing.T) {
	w := &world{t, netnstest.New(t), VariantLegacy, proxier.DefaultNames()}
	path := filepath.Join(t.TempDir(), "lock")
	p := w.startOdd(toolConfig{lockFile: path, lockWait: time.Second})
	add(p, 0, 3)
	w.sync(p)
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	add(p, 3, 5)
	family := func() proxier.FamilyStatus { return p.Status().Families[v1.IPv4Protocol] }
	if !poll.Soon(func() bool { return errors.Is(family().LastError, errLocked) && time.Since(began) > 4*time.Second }) {
		t.Fatalf("last error %v, want %v", family().LastError, errLocked)
	}
	if since := family().StaleSince; since.Before(began.Add(-time.Second)) || since.After(began.Add(2*time.Second)) {
		t.Errorf("stale since %v, want since about %v", since, began)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	released := time.Now()
	if !poll.Soon(func() bool { return strings.Contains(w.save(), "test/web-4") }) {
		t.Fatalf("not programmed %v after the release: %v", time.Since(released), family().LastError)
	}
	t.Logf("programmed %v after the release", time.Since(released).Round(time.Millisecond))
}

// TestPacketsOutOfOrderAreDropped unless somebody wants them: PKT-83.
func TestPacketsOutOfOrderAreDropped(t *testing.T) {
	w := &world{t, netnstest.New(t), VariantNFT, proxier.KubeProxyNames()}
	drops := func() bool { return strings.Contains(w.iptables("-S", "KUBE-FORWARD"), "--ctstate INVALID -j DROP") }
	_, stop := w.startWith(some(1))
	if !drops() {
		t.Error("no rule about INVALID, want one by default")
	}
	stop()
	_, stop = w.startWith(some(1), func(c *Config) { c.KeepInvalid = true })
	if drops() {
		t.Error("a rule about INVALID, want none with KeepInvalid")
	}
	stop()
	netnstest.Check(t, w.ns.Do(func() error { return os.WriteFile(tcpBeLiberal, []byte("1"), 0o600) }))
	w.startWith(some(1))
	if drops() {
		t.Error("a rule about INVALID, want none where the kernel is liberal")
	}
}

// picky is a restore program that refuses lines about one Service. It names the
// line, or that of the COMMIT behind it, as iptables-legacy does for the kernel.
func picky(t *testing.T, variant Variant, pattern string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, kind := range []string{"", "-restore", "-save"} {
			program := name + "-" + string(variant) + kind
			real, err := exec.LookPath(program)
			netnstest.Check(t, err)
			script := "#!/bin/sh\nexec " + real + " \"$@\"\n"
			if kind == "-restore" {
				script = "#!/bin/sh\ninput=$(cat)\ncase \"$input\" in *test/bad:*) line=$(printf '%s\\n' \"$input\" | grep -n '" + pattern + "' | tail -n 1 | cut -d: -f1);; esac\n" +
					"if [ -n \"$line\" ]; then echo \"" + program + ": line $line failed\" >&2; exit 1; fi\n" +
					"printf '%s\\n' \"$input\" | " + real + " \"$@\"\n"
			}
			if err := os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// TestAServiceThatIsRefusedIsSetAside while the rest goes in, and is named.
func TestAServiceThatIsRefusedIsSetAside(t *testing.T) {
	for names, pattern := range map[string]string{"its line": "A .*test/bad:", "COMMIT": "COMMIT"} {
		t.Run(names, func(t *testing.T) {
			w := &world{t, netnstest.New(t), VariantLegacy, proxier.DefaultNames()}
			p := w.startOdd(toolConfig{dir: picky(t, w.variant, pattern)})
			add(p, 0, 3)
			w.sync(p)
			p.OnServiceAdd(proxiertest.Service("test", "bad", proxiertest.ClusterIPs("10.96.77.77"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
			p.OnEndpointSliceAdd(slice("bad", discovery.AddressTypeIPv4, "10.244.0.99"))
			add(p, 3, 5)
			err := p.Sync(t.Context())
			failed, ok := errors.AsType[*proxier.ServiceError](err)
			if !ok || failed.Name.Name != "bad" {
				t.Fatalf("sync = %v, want a ServiceError about bad", err)
			}
			text := w.save()
			if strings.Contains(text, "test/bad") || !strings.Contains(text, "test/web-4") {
				t.Errorf("rules are\n%swant all Services but bad", text)
			}
			p.OnServiceDelete(proxiertest.Service("test", "bad"))
			w.sync(p)
		})
	}
}
