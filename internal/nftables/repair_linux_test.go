package nftables

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// predecessor is the table of a previous process, in use: with Services of all kinds, one
// of them with session affinity and a client's record.
type predecessor struct {
	*world
	ns     *netns.NS
	m      model
	record string // the client's record as nft prints it
	handle string // of the table: another one is another table
}

func startPredecessor(t *testing.T, w *world) *predecessor {
	t.Helper()
	p := &predecessor{world: w, ns: netnstest.New(t), m: model{}}
	for n := range 20 {
		p.m[name(n)] = w.service(n)
	}
	sticky := p.m[name(0)]
	sticky.Affinity = 3 * time.Hour
	sticky.ClusterWeights, sticky.LocalWeights, sticky.Port = nil, nil, nil
	sticky.Cluster = desired.EndpointsOf(netip.AddrPortFrom(w.addr(244, 1), 8080), netip.AddrPortFrom(w.addr(244, 2), 8080))
	sticky.Local, sticky.OnNode, sticky.Frontends = desired.Endpoints{}, nil, nil
	w.add(sticky, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, 0), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNone})

	e := w.engine(t, p.ns)
	// Other service ports had affinity before, so that a new engine would choose other
	// numbers.
	for n := 30; n < 34; n++ {
		other := *sticky
		other.Name = name(n)
		other.Frontends = nil
		w.add(&other, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeNone})
		mustApply(t, e, model{other.Name: &other}.full(w))
	}
	mustApply(t, e, p.m.full(w))
	id := e.state.affinity.services[name(0)]
	p.record = fmt.Sprintf("0x%08x . %s : 0x%08x", id.key(), w.addr(1, 1), id.endpoint(sticky.Cluster.Slice()[1]))
	mustNFT(t, p.ns, fmt.Sprintf("add element %s serviceplane affinity { 0x%08x . %s timeout 3h : 0x%08x }",
		ipKeyword(w.family), id.key(), w.addr(1, 1), id.endpoint(sticky.Cluster.Slice()[1])))
	p.handle = p.tableHandle(t)
	return p
}

func (p *predecessor) tableHandle(t *testing.T) string {
	t.Helper()
	_, handle, _ := strings.Cut(nftOutput(t, p.ns, "-a", "list", "table", ipKeyword(p.family), "serviceplane"), "# handle ")
	handle, _, _ = strings.Cut(handle, "\n")
	return handle
}

// mustBeRepaired checks that the engine kept the table and the client's record, and that
// everything else matches the update.
func (p *predecessor) mustBeRepaired(t *testing.T, e *Engine, u desired.Update) {
	t.Helper()
	if got := p.tableHandle(t); got != p.handle {
		t.Errorf("the table has handle %s, want it to be the one with handle %s", got, p.handle)
	}
	record := nftOutput(t, p.ns, "list", "map", ipKeyword(p.family), "serviceplane", "affinity")
	var words []string
	for word := range strings.FieldsSeq(record) {
		words = append(words, word)
	}
	key, data, _ := strings.Cut(p.record, " : ")
	if list := strings.Join(words, " "); !strings.Contains(list, key) || !strings.Contains(list, data) {
		t.Errorf("affinity records %s, want %s still there", list, p.record)
	}
	if got := e.state.affinity.services[name(0)].endpoint(p.m[name(0)].Cluster.Slice()[1]); !strings.HasSuffix(p.record, fmt.Sprintf("0x%08x", got)) {
		t.Errorf("the endpoint on record has number %#x, want that of the record, %s", got, p.record)
	}
	mustMatch(t, e, p.m)
	mustWriteNothing(t, e, u, "the same again")
	mustWriteNothing(t, p.engineLike(t, e), u, "another restart")
	for _, left := range []string{"old-", "__set"} {
		if strings.Contains(mustList(t, p.ns), left) {
			t.Errorf("something of the predecessor is left: %s", left)
		}
	}
}

// engineLike starts another engine with the same configuration.
func (p *predecessor) engineLike(t *testing.T, e *Engine) *Engine {
	t.Helper()
	return p.engineWith(t, func(c *Config) { *c = e.config })
}

func (p *predecessor) engineWith(t *testing.T, change func(*Config)) *Engine {
	t.Helper()
	config := Config{Config: proxier.Config{NetNS: p.ns.Path()}}
	change(&config)
	e, err := NewEngine(config, p.family, proxier.Deps{})
	if err != nil {
		t.Fatalf("new engine: %v", err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// TestATableOfAnotherConfigurationStaysInUse changes the mark, the priorities and pod
// detection: all of them are in the rules.
func TestATableOfAnotherConfigurationStaysInUse(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		p := startPredecessor(t, w)
		u := p.m.full(w)
		u.Globals.PodCIDRs, u.Globals.PodInterface = nil, "veth*"
		e := p.engineWith(t, func(c *Config) {
			c.Masquerade.Mark, c.DNATPriority, c.SNATPriority = 1<<20, -90, 110
		})
		mustApply(t, e, u)
		p.mustBeRepaired(t, e, u)
		list := mustList(t, p.ns)
		for _, want := range []string{"priority -90;", "priority srcnat + 10;", "0x00100000", `iifname != "veth*"`} {
			if !strings.Contains(list, want) {
				t.Errorf("the rules do not have %s:\n%s", want, list)
			}
		}
	})
}

// TestATableOfAnotherVersionIsTakenOver gives the table what another version may leave:
// other rules, another version in the base chains, unknown sets, missing sets, chains that
// lead to each other.
func TestATableOfAnotherVersionIsTakenOver(t *testing.T) {
	older := `
		flush chain IP serviceplane prerouting
		delete chain IP serviceplane prerouting
		flush chain IP serviceplane local
		delete map IP serviceplane locals
		flush chain IP serviceplane firewall
		delete set IP serviceplane source-ranges
		table IP serviceplane {
			chain old-target { counter; }
			chain old-leaf { counter; }
			map old-dispatch { type mark : verdict; elements = { 0x1 : goto old-target, 0x2 : goto old-leaf }; }
			chain old-other { meta mark vmap @old-dispatch; }
			set old-set { type mark; elements = { 0x7 }; }
			chain old-jump { meta mark @old-set jump old-other; tcp dport { 80, 443 } accept; }
			chain prerouting {
				type nat hook prerouting priority -100; comment "serviceplane layout 0";
				jump old-jump
				jump services
			}
			chain all-cluster-7 { counter; drop; }
			chain old-base { type filter hook forward priority 0; meta mark 7 drop; }
		}
		add element IP serviceplane classes { 0x80009999 : goto old-target }
	`
	eachFamily(t, func(t *testing.T, w *world) {
		p := startPredecessor(t, w)
		mustNFT(t, p.ns, strings.ReplaceAll(older, "IP", ipKeyword(w.family)))
		for n, endpoints := range map[int]int{1: 7, 2: 23} { // two new classes: one has a chain already, the other has none
			grown := *p.m[name(n)]
			grown.Affinity, grown.Local, grown.Frontends, grown.Cluster = 0, desired.Endpoints{}, nil, desired.Endpoints{}
			grown.ClusterWeights, grown.LocalWeights, grown.Port = nil, nil, nil
			for i := range endpoints {
				grown.Cluster = grown.Cluster.With(netip.AddrPortFrom(w.addr(244, 100+i), 8080))
			}
			w.add(&grown, desired.Frontend{Kind: desired.ClusterIP, VIP: w.addr(96, n), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeAll})
			p.m[name(n)] = &grown
		}
		e := w.engine(t, p.ns)
		u := p.m.full(w)
		mustApply(t, e, u)
		p.mustBeRepaired(t, e, u)
		if list := mustList(t, p.ns); strings.Count(list, `comment "serviceplane layout 1"`) != 3 {
			t.Errorf("want the version in three base chains:\n%s", list)
		}
	})
}

// TestNewSourceRangesOverlapOldOnes: a repair replaces source ranges by others that begin, end
// or lie in them, or around them. Each change begins with a new engine, as after a restart.
func TestNewSourceRangesOverlapOldOnes(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		p := startPredecessor(t, w)
		at := w.addr(5, 0)
		var all []netip.Prefix
		for _, bits := range []int{at.BitLen() - 16, at.BitLen() - 8, at.BitLen()} {
			all = append(all, netip.PrefixFrom(at, bits).Masked())
		}
		all = append(all, netip.PrefixFrom(lastAddr(all[1]), at.BitLen()))
		guarded := *p.m[name(1)]
		guarded.Frontends = nil
		p.m[name(1)] = &guarded
		for _, i := range []int{0, 0, 1, 1, 2, 2, 3, 3, 0, 2, 0, 3, 1, 3, 2, 1, 0} { // which has each pair
			guarded.Frontends = nil
			w.add(&guarded, desired.Frontend{
				Kind: desired.LoadBalancer, VIP: w.addr(203, 1), Port: 80, Scope: desired.ScopeCluster, Masquerade: desired.MasqueradeAll, Restricted: true, SourceRanges: all[i : i+1],
			})
			e := p.engineWith(t, func(*Config) {})
			mustApply(t, e, p.m.full(w))
			mustMatch(t, e, p.m)
			if got := p.tableHandle(t); got != p.handle {
				t.Fatalf("to %v: the table was replaced", all[i])
			}
		}
	})
}

// TestTheVersionIsKept changes the version in one base chain with the right rules.
func TestTheVersionIsKept(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		p := startPredecessor(t, w)
		e := w.engine(t, p.ns)
		u := p.m.full(w)
		mustApply(t, e, u)
		for _, c := range e.state.layout.chains() {
			if c.name != "output" {
				continue
			}
			b := e.newBatch()
			b.FlushChain(c.name)
			b.DeleteChain(c.name)
			if err := b.chains([]chainSpec{c}); err != nil {
				t.Fatal(err)
			}
			for i := range b.Buf {
				if strings.HasPrefix(string(b.Buf[i:]), layoutVersion) {
					b.Buf[i+len(layoutVersion)-1] = '0'
				}
			}
			if err := e.send(t.Context(), b); err != nil {
				t.Fatal(err)
			}
		}
		if n := strings.Count(mustList(t, p.ns), `comment "serviceplane layout 0"`); n != 1 {
			t.Fatalf("%d chains of another version, want 1", n)
		}
		mustApply(t, e, u)
		p.mustBeRepaired(t, e, u)
		if n := strings.Count(mustList(t, p.ns), `comment "serviceplane layout 1"`); n != 3 {
			t.Errorf("%d base chains of this version, want 3", n)
		}
	})
}

// TestATableOfSomebodyElseIsReplaced: in nodeproxy, kube-proxy's table has our name.
func TestATableOfSomebodyElseIsReplaced(t *testing.T) {
	foreign := `table IP serviceplane {
		comment "rules for kube-proxy"
		set cluster-ips { type ADDR; comment "Active ClusterIPs"; elements = { VIP } }
		map service-ips { type ADDR . inet_proto . inet_service : verdict; elements = { VIP . tcp . 80 : goto service-A } }
		chain endpoint-A { meta l4proto tcp dnat to 192.0.2.1:80; }
		chain service-A { numgen random mod 1 vmap { 0 : goto endpoint-A }; }
		chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
		chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
	}`
	t.Parallel()
	w := &world{family: v1.IPv4Protocol}
	ns := netnstest.New(t)
	mustNFT(t, ns, strings.NewReplacer("IP ", "ip ", "ADDR", "ipv4_addr", "VIP", "10.96.9.9").Replace(foreign))
	core, logs := observer.New(zap.InfoLevel)
	e, err := NewEngine(Config{Config: proxier.Config{NetNS: ns.Path()}}, w.family, proxier.Deps{Logger: zap.New(core)})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	mustApply(t, e, model{}.full(w))
	for _, left := range []string{"service-ips", "endpoint-A", "nat-prerouting", "10.96.9.9"} {
		if strings.Contains(mustList(t, ns), left) {
			t.Errorf("%s is left", left)
		}
	}
	if logs.FilterMessageSnippet("replacing").Len() != 1 {
		t.Errorf("log %v, want one line about the replacement", logs.All())
	}
	if r := e.report; r.Transactions != 1 {
		t.Errorf("%d transactions, want the table replaced in one", r.Transactions)
	}
}

// TestATableThatCannotBeRepairedIsReplaced makes a foreign map refer to one of our chains,
// so that it cannot become a base chain again.
func TestATableThatCannotBeRepairedIsReplaced(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		p := startPredecessor(t, w)
		ip := ipKeyword(w.family)
		mustNFT(t, p.ns, strings.ReplaceAll(`
			flush chain IP serviceplane prerouting
			delete chain IP serviceplane prerouting
			table IP serviceplane {
				chain prerouting { counter; }
				map foreign { type mark : verdict; elements = { 0x1 : goto prerouting }; }
			}`, "IP", ip))
		e := w.engine(t, p.ns)
		u := p.m.full(w)
		for range maxFailedRepairs {
			if _, err := e.Apply(t.Context(), u); err == nil {
				t.Fatal("the table could be repaired: this test proves nothing")
			}
		}
		mustApply(t, e, u)
		mustMatch(t, e, p.m)
		mustWriteNothing(t, e, u, "the same again")
	})
}

// TestNamesOfSetsStandForTheirShapes: versions that share a table rely on it. A changed set
// gets a new name; this list only grows.
func TestNamesOfSetsStandForTheirShapes(t *testing.T) {
	shapes := map[string]string{}
	for i := range setSpecs {
		spec := &setSpecs[i]
		text := typeName(spec.key, 4)
		if spec.data != nil {
			text += " : " + typeName(spec.data, 4)
		}
		shapes[spec.name] = fmt.Sprintf("%s, flags %#x", text, spec.flags())
	}
	const vip, port = "ipv4_addr . inet_proto . inet_service", "inet_proto . inet_service"
	released := map[string]string{
		"services":                   vip + " : mark, flags 0x88",
		"nodeports":                  port + " : mark, flags 0x88",
		"frontends":                  vip + ", flags 0x80",
		"nodeport-frontends":         port + ", flags 0x80",
		"classes":                    "mark : verdict, flags 0x8",
		"cluster-ips":                "ipv4_addr, flags 0x0",
		"service-cidrs":              "ipv4_addr, flags 0x4",
		"nodeport-addresses":         "ipv4_addr, flags 0x4",
		"pod-cidrs":                  "ipv4_addr, flags 0x4",
		"firewalled":                 vip + " : mark, flags 0x88",
		"firewalled-classes":         "mark : verdict, flags 0x8",
		"source-ranges":              vip + " . ipv4_addr, flags 0x84",
		"locals":                     vip + " : mark, flags 0x88",
		"nodeport-locals":            port + " : mark, flags 0x88",
		"local-classes":              "mark : verdict, flags 0x8",
		"short-circuits":             vip + " : mark, flags 0x88",
		"nodeport-short-circuits":    port + " : mark, flags 0x88",
		"short-circuit-classes":      "mark : verdict, flags 0x8",
		"endpoints":                  vip + " . mark : ipv4_addr . inet_service, flags 0x88",
		"nodeport-endpoints":         port + " . mark : ipv4_addr . inet_service, flags 0x88",
		"hairpin":                    "ipv4_addr . ipv4_addr, flags 0x80",
		"health-ports":               port + ", flags 0x80",
		"affinity-ids":               vip + " : mark, flags 0x88",
		"nodeport-affinity-ids":      port + " : mark, flags 0x88",
		"affinity-keys":              vip + " : mark, flags 0x88",
		"nodeport-affinity-keys":     port + " : mark, flags 0x88",
		"affinity-timeouts":          "mark : verdict, flags 0x8",
		"affinity-counts":            "mark : mark, flags 0x8",
		"affinity-draws":             "mark : verdict, flags 0x8",
		"affinity-picks":             vip + " . mark : mark, flags 0x88",
		"nodeport-affinity-picks":    port + " . mark : mark, flags 0x88",
		"affinity-endpoints":         "mark : ipv4_addr . inet_service, flags 0x8",
		"affinity":                   "mark . ipv4_addr : mark, flags 0xb8",
		"endpoint-counters":          vip + " . mark, flags 0xa0",
		"nodeport-endpoint-counters": port + " . mark, flags 0xa0",
		"affinity-endpoint-counters": "mark, flags 0x20",
		"fast-vips":                  vip + ", flags 0x80",
		"fast-nodeports":             port + " . ipv4_addr . inet_service, flags 0x80",
		"direct-vips":                vip + ", flags 0x80",
		"client-limits":              vip + " : mark, flags 0x88",
		"limit-classes":              "mark : verdict, flags 0x8",
		"refused":                    vip + ", flags 0xa0",
	}
	for name, shape := range shapes {
		if want, ok := released[name]; ok && want != shape {
			t.Errorf("set %s is %q, but was released as %q: give it another name", name, shape, want)
		} else if !ok {
			t.Errorf("set %s: add it to the list", name)
		}
	}
}
