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

	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a network namespace for Providers of one variant.
type world struct {
	t       *testing.T
	ns      *netns.NS
	variant Variant
	names   proxier.Names
}

// variants are those of which a test runs: one by chance, or both if tests do all of their work.
func variants(t *testing.T) []Variant {
	t.Helper()
	return chance.Some(t, 1, VariantNFT, VariantLegacy)
}

// everyVariant runs a test with variants, and names of both kinds.
func everyVariant(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	for _, variant := range variants(t) {
		for _, names := range []proxier.Names{proxier.KubeProxyNames(), proxier.DefaultNames()} {
			t.Run(string(variant)+"/"+names.Instance, func(t *testing.T) {
				t.Parallel()
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
		Variant: w.variant, RouteLocalnet: true,
	}
}

// start runs a Provider until the test ends, or stop is called.
func (w *world) start(change ...func(*Config)) (p *proxier.Proxier, stop func()) {
	w.t.Helper()
	return w.startDeps(proxier.Deps{}, change...)
}

func (w *world) startDeps(deps proxier.Deps, change ...func(*Config)) (p *proxier.Proxier, stop func()) {
	w.t.Helper()
	deps.Health = proxier.NoHealth()
	config := w.config()
	for _, c := range change {
		c(&config)
	}
	p, err := New(config, deps)
	if err != nil {
		w.t.Fatal(err)
	}
	return p, poll.Background(w.t, p.Run)
}

// startWith runs a Provider that has Services at its first sync.
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
	return netnstest.Run(w.t, w.ns, name, args...)
}

func (w *world) iptables(args ...string) string {
	w.t.Helper()
	return w.run("iptables-"+string(w.variant), append([]string{"-w"}, args...)...)
}

// save returns both tables of both families, without counters and times.
func (w *world) save() string {
	w.t.Helper()
	var text strings.Builder
	for _, program := range []string{"iptables", "ip6tables"} {
		for _, table := range []string{"nat", "filter"} {
			for line := range strings.Lines(w.run(program+"-"+string(w.variant)+"-save", "-t", table)) {
				if !strings.HasPrefix(line, "#") {
					line, _, _ = strings.Cut(strings.TrimSuffix(line, "\n"), " [")
					text.WriteString(line + "\n")
				}
			}
		}
	}
	return text.String()
}

// add adds Services of all kinds.
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
	if err := proxiertest.Sync(w.t.Context(), p); err != nil {
		w.t.Fatalf("sync: %v", err)
	}
}

// lastWrites returns the report of the last sync of each family.
func lastWrites(p *proxier.Proxier) map[v1.IPFamily]proxier.SyncReport {
	last := map[v1.IPFamily]proxier.SyncReport{}
	for _, r := range p.History() {
		last[r.Family] = r
	}
	return last
}

// TestSyncsWriteWhatChanged: a restart writes nothing, a change of one endpoint writes few
// bytes, and partial syncs leave what a full sync would write.
func TestSyncsWriteWhatChanged(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		p, stop := w.startWith(some(60))
		whole, before := bytesWritten(p, time.Time{}), w.save()
		stop()
		p, stop = w.startWith(some(60))
		for _, r := range p.History() {
			if r.Apply.Writes != 0 {
				t.Errorf("%s: a restart wrote %d rules and chains, full %v, want 0", r.Family, r.Apply.Writes, r.Full)
			}
		}
		if diff := gocmp.Diff(before, w.save()); diff != "" {
			t.Errorf("rules (-before +after a restart):\n%s", diff)
		}

		began := time.Now()
		p.OnEndpointSliceAdd(slice("web-8", discovery.AddressTypeIPv4, append(endpoints4(8, 8), "10.244.99.99")...))
		w.sync(p)
		if one := bytesWritten(p, began); one == 0 || one*50 > whole {
			t.Errorf("one endpoint: %d of %d bytes, want at most 2 %%", one, whole)
		}

		changeMany(p)
		w.sync(p)
		for family, r := range lastWrites(p) {
			if r.Full {
				t.Errorf("%s: the last sync is full, want a partial one", family)
			}
		}
		partial := w.save()
		stop()
		other := &world{t, netnstest.New(t), w.variant, w.names}
		other.startWith(func(p *proxier.Proxier) { add(p, 0, 60); changeMany(p) })
		if diff := gocmp.Diff(other.save(), partial); diff != "" {
			t.Errorf("rules (-from scratch +by changes):\n%s", diff)
		}
	})
}

// changeMany adds, deletes and changes Services.
func changeMany(p *proxier.Proxier) {
	add(p, 60, 90)
	for i := 10; i < 45; i++ {
		p.OnServiceDelete(proxiertest.Service("test", fmt.Sprintf("web-%d", i)))
	}
	for i := range 10 {
		p.OnEndpointSliceAdd(slice(fmt.Sprintf("web-%d", i), discovery.AddressTypeIPv4, endpoints4(i, 20-i)...))
	}
}

// bytesWritten sums the bytes of all IPv4 syncs since a time. There may be more syncs than
// the test requested.
func bytesWritten(p *proxier.Proxier, since time.Time) (sum int) {
	for _, r := range p.History() {
		if r.Family == v1.IPv4Protocol && r.Started.After(since) {
			sum += r.Apply.Bytes
		}
	}
	return sum
}

// Damage is repaired, while the rules of other programs keep their order. TestWatcherDetectsDamage is for the
// detection of each kind of damage.
func TestDamageIsRepaired(t *testing.T) {
	everyVariant(t, func(t *testing.T, w *world) {
		w.iptables("-t", "nat", "-A", "OUTPUT", "-d", "192.0.2.99/32", "-m", "comment", "--comment", "of another program", "-j", "RETURN")
		w.iptables("-N", "FOREIGN")
		w.iptables("-A", "FORWARD", "-j", "FOREIGN")
		w.startWith(some(20))
		before := w.save()
		n := chainNames{w.names.ChainPrefix}
		for damage, commands := range map[string][][]string{
			"chains": {{"-t", "nat", "-F", n.services()}, {"-t", "nat", "-D", n.postrouting(), "1"}, {"-t", "nat", "-A", n.mark(), "-j", "RETURN"}},
			"jumps":  {{"-t", "nat", "-D", "OUTPUT", "1"}, {"-D", "INPUT", "1"}},
		} {
			for _, args := range commands {
				w.iptables(args...)
			}
			// The sync that repairs the last damage may repair this one too.
			if !poll.Soon(func() bool { return w.save() == before }) {
				t.Fatalf("%s (-before +now):\n%s", damage, gocmp.Diff(before, w.save()))
			}
		}
	})
}

// A cleanup keeps the rules of other programs, in both variants, byte for byte.
func TestCleanupKeepsRulesOfOtherPrograms(t *testing.T) {
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

// TestTakeOverFromKubeProxy: chains and jumps that only kube-proxy has are deleted, and jumps
// to chains that the engine has too keep their place.
func TestTakeOverFromKubeProxy(t *testing.T) {
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
				t.Errorf("INPUT is\n%swant one jump to KUBE-SERVICES, none to chains that only kube-proxy has, and the other rule last", got)
			}
			if text := w.save(); strings.Contains(text, "OLDOLD") || strings.Contains(text, "KUBE-PROXY-FIREWALL") {
				t.Errorf("chains of the predecessor are left:\n%s", text)
			}
		})
	}
}

// startOdd runs a Provider of IPv4 with other programs or another lock.
func (w *world) startOdd(odd toolConfig) *proxier.Proxier {
	w.t.Helper()
	config := w.config().WithDefaults()
	config.Families = []v1.IPFamily{v1.IPv4Protocol}
	e, err := newEngine(config, v1.IPv4Protocol, proxier.Deps{})
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
	poll.Background(w.t, p.Run)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return p
}

// TestSyncsFailWhileTheLockIsHeld: each fails with errLocked, Status reports since when, and
// after the release everything is programmed.
func TestSyncsFailWhileTheLockIsHeld(t *testing.T) {
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
	failures := func() (n int) {
		for _, r := range p.History() {
			if errors.Is(r.Err, errLocked) {
				n++
			}
		}
		return n
	}
	poll.Until(t, "the first sync fails", func() bool { return failures() > 0 })
	failed := time.Now()
	poll.Until(t, "the retry fails", func() bool { return failures() > 1 })
	if since := family().StaleSince; since.Before(began) || since.After(failed) {
		t.Errorf("stale since %v, want between %v and %v", since, began, failed)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	poll.Until(t, "the Services are programmed", func() bool { return strings.Contains(w.save(), "test/web-4") })
}

// Invalid packets are dropped, unless configured otherwise: PKT-83.
func TestInvalidPacketsAreDropped(t *testing.T) {
	w := &world{t, netnstest.New(t), VariantNFT, proxier.KubeProxyNames()}
	drops := func() bool { return strings.Contains(w.iptables("-S", "KUBE-FORWARD"), "--ctstate INVALID ") }
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
		t.Error("a rule about INVALID, want none with nf_conntrack_tcp_be_liberal")
	}
}

// picky creates a restore program that refuses lines about one Service. Its error names the
// line, or that of COMMIT, as iptables-legacy does if the kernel refuses a rule. It ends with the file
// fault in dir.
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
				script = "#!/bin/sh\ninput=$(cat)\ncase \"$(ls " + dir + ")$input\" in *fault*test/bad:*) line=$(printf '%s\\n' \"$input\" | grep -n '" + pattern + "' | tail -n 1 | cut -d: -f1);; esac\n" +
					"if [ -n \"$line\" ]; then echo \"" + program + ": line $line failed\" >&2; exit 1; fi\n" +
					"printf '%s\\n' \"$input\" | " + real + " \"$@\"\n"
			}
			if err := os.WriteFile(filepath.Join(dir, program), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	netnstest.Check(t, os.WriteFile(filepath.Join(dir, "fault"), nil, 0o600))
	return dir
}

// A Service that iptables-restore refuses is set aside, while all others are programmed. When iptables-restore
// takes it, it is programmed too, also while events never pause.
func TestAServiceThatIsRefusedIsSetAside(t *testing.T) {
	for names, pattern := range map[string]string{"its line": "A .*test/bad:", "COMMIT": "COMMIT"} {
		t.Run(names, func(t *testing.T) {
			w := &world{t, netnstest.New(t), VariantLegacy, proxier.DefaultNames()}
			dir := picky(t, w.variant, pattern)
			p := w.startOdd(toolConfig{dir: dir})
			add(p, 0, 3)
			w.sync(p)
			p.OnServiceAdd(proxiertest.Service("test", "bad", proxiertest.ClusterIPs("10.96.77.77"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
			p.OnEndpointSliceAdd(slice("bad", discovery.AddressTypeIPv4, "10.244.0.99"))
			add(p, 3, 5)
			failed := func() []*proxier.ServiceError { return p.Status().Families[v1.IPv4Protocol].Failed }
			if err := p.Sync(t.Context()); err != nil || len(failed()) != 1 || failed()[0].Name.Name != "bad" {
				t.Fatalf("sync = %v, failed %v, want bad", err, failed())
			}
			text := w.save()
			if strings.Contains(text, "test/bad") || !strings.Contains(text, "test/web-4") {
				t.Errorf("rules are\n%swant all Services but bad", text)
			}
			netnstest.Check(t, os.Remove(filepath.Join(dir, "fault")))
			events := 0
			poll.Until(t, "bad is programmed", func() bool {
				events++
				p.OnEndpointSliceAdd(slice("web-0", discovery.AddressTypeIPv4, fmt.Sprintf("10.244.3.%d", 1+events%200)))
				return strings.Contains(w.save(), "test/bad")
			})
			p.OnServiceDelete(proxiertest.Service("test", "bad"))
			w.sync(p)
		})
	}
}
