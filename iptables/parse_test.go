package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/chance"
	"github.com/serviceplane/serviceplane/proxier"
)

func TestParse(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want observed
	}{
		"nothing":                 {"", observed{chains: ruleset{}}},
		"comments, table, commit": {"# a comment\n*nat\nCOMMIT\n", observed{chains: ruleset{}}},
		"chains of others": {
			":OUTPUT ACCEPT [1:60]\n:SPLENDID - [0:0]\n-A OUTPUT -j SPLENDID\n-A SPLENDID -j RETURN\n", observed{chains: ruleset{}},
		},
		"a foreign rule that only counts": {"-A OUTPUT\n", observed{chains: ruleset{}}},
		"a chain of ours without rules":   {":SPL-SERVICES - [0:0]\n", observed{chains: ruleset{"SPL-SERVICES": {}}}},
		"rules of ours in their order": {
			":SPL-SVC-AAAAAAAAAAAAAAAA - [3:180]\n-A SPL-SVC-AAAAAAAAAAAAAAAA -p tcp -j SPL-SVC-BBBBBBBBBBBBBBBB\n-A SPL-SVC-AAAAAAAAAAAAAAAA -j RETURN\n",
			observed{chains: ruleset{"SPL-SVC-AAAAAAAAAAAAAAAA": {"-p tcp -j SPL-SVC-BBBBBBBBBBBBBBBB", "-j RETURN"}}},
		},
		"a jump of a foreign chain to ours": {
			":OUTPUT ACCEPT [0:0]\n-A OUTPUT -j LOG\n-A OUTPUT -m comment --comment \"to us\" -j SPL-SERVICES\n",
			observed{chains: ruleset{}, jumps: []jump{{"OUTPUT", "SPL-SERVICES", `-m comment --comment "to us" -j SPL-SERVICES`}}},
		},
		"a jump in a comment or a prefix only": {
			"-A OUTPUT -m comment --comment \"not -j SPL-SVC-AAAAAAAAAAAAAAAA any more\"\n" +
				"-A OUTPUT -j LOG --log-prefix \"see -j SPL-SVC-BBBBBBBBBBBBBBBB now\"\n", observed{chains: ruleset{}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parse([]byte(c.text), chainNames{"SPL"}.owns)
			if err != nil {
				t.Fatalf("parse: %v", err)
			}
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(observed{}, jump{})); diff != "" {
				t.Errorf("parsed (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseErrorsNameTheLine(t *testing.T) {
	for text, want := range map[string]string{
		"*nat\n:SPL-SERVICES\n":                             "line 2",
		"*nat\n# a\n: - [0:0]\n":                            "line 3",
		"*nat\n-A OUTPUT " + strings.Repeat("x", 1<<20+100): "line 2",
	} {
		if _, err := parse([]byte(text), chainNames{"SPL"}.owns); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parse of %.40q = %v, want an error with %s", text, err, want)
		}
	}
}

func TestTargetOfARule(t *testing.T) {
	for r, want := range map[rule]string{
		"":                               "",
		"-j":                             "",
		"-p tcp":                         "",
		"-j KUBE-SERVICES":               "KUBE-SERVICES",
		"-g KUBE-SERVICES":               "KUBE-SERVICES",
		"-p tcp -j KUBE-SVC-A":           "KUBE-SVC-A",
		"-j MARK --set-xmark 0x1/0x1":    "MARK",
		`-m comment --comment -j -j A`:   "A",
		`-m comment --comment "-j A"`:    "",
		`-m comment --comment "\"-j A "`: "",
		`-m comment --comment "what -j B did" -j A`: "A",
		`-j LOG --log-prefix "where -j A was"`:      "LOG",
	} {
		if got := r.jumpsTo(); got != want {
			t.Errorf("target of %q = %q, want %q", r, got, want)
		}
	}
}

func TestRuleWithoutComment(t *testing.T) {
	for r, want := range map[rule]rule{
		"":                               "",
		"-j A":                           "-j A",
		"-m comment --comment one -j A":  "-j A",
		"-m comment --comment one":       "",
		`-m comment --comment "one two"`: "",
		`-m comment --comment "" -j A`:   "-j A",
		`-p tcp -m comment --comment "a \"b\" \\" -m tcp --dport 80 -j A`:       "-p tcp -m tcp --dport 80 -j A",
		`-m comment --comment "never ends -j A`:                                 "",
		`-m comment --comment "ends in \`:                                       "",
		`-m comment --comment one -m mark -m comment --comment "two more" -j A`: "-m mark -j A",
	} {
		if got := r.withoutComment(); got != want {
			t.Errorf("%q without comment = %q, want %q", r, got, want)
		}
	}
}

func TestRepairJumps(t *testing.T) {
	want := []jump{
		{"OUTPUT", "SPL-SERVICES", `-m comment --comment "ours" -j SPL-SERVICES`},
		{"POSTROUTING", "SPL-POSTROUTING", "-j SPL-POSTROUTING"},
	}
	there := []jump{
		{"OUTPUT", "SPL-SERVICES", "-j SPL-SERVICES"}, {"POSTROUTING", "SPL-POSTROUTING", "-j SPL-POSTROUTING"},
	}
	for name, c := range map[string]struct {
		have             []jump
		deletes, inserts []string
	}{
		"all are missing": {nil, nil, []string{
			`-I OUTPUT 1 -m comment --comment "ours" -j SPL-SERVICES`, "-I POSTROUTING 1 -j SPL-POSTROUTING",
		}},
		"all exist, one with another comment": {there, nil, nil},
		"one is duplicate":                    {append(there[:2:2], there[1]), []string{"-D POSTROUTING -j SPL-POSTROUTING"}, nil},
		"one to a chain of another version": {
			append(there[:2:2], jump{"OUTPUT", "SPL-OLD", "-p tcp -j SPL-OLD"}), []string{"-D OUTPUT -p tcp -j SPL-OLD"}, nil,
		},
		"one matches fewer packets": {
			[]jump{{"OUTPUT", "SPL-SERVICES", "-p tcp -j SPL-SERVICES"}, there[1]},
			[]string{"-D OUTPUT -p tcp -j SPL-SERVICES"},
			[]string{`-I OUTPUT 1 -m comment --comment "ours" -j SPL-SERVICES`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			deletes, inserts, after := repairJumps(want, c.have)
			for _, w := range want {
				if len(after[w.chain]) != 1 {
					t.Errorf("%s has jumps %q then, want one", w.chain, after[w.chain])
				}
			}
			if !slices.Equal(deletes, c.deletes) || !slices.Equal(inserts, c.inserts) {
				t.Errorf("deletes %q, inserts %q, want %q and %q", deletes, inserts, c.deletes, c.inserts)
			}
		})
	}
}

// FuzzParse: parsed rules are the same after printing and parsing them again, for any text.
func FuzzParse(f *testing.F) {
	f.Add(":OUTPUT ACCEPT [1:60]\n:SPL-SVC-AAAAAAAAAAAAAAAA - [0:0]\n-A OUTPUT -j SPL-SVC-AAAAAAAAAAAAAAAA\n-A SPL-SVC-AAAAAAAAAAAAAAAA -p tcp -m comment --comment \"a \\\"b\\\"\" -j RETURN\n")
	f.Add("-A OUTPUT\n-A SPL-SVC-AAAAAAAAAAAAAAAA \n:SPL-SVC-BBBBBBBBBBBBBBBB")
	f.Add("-A OUTPUT -m comment --comment \"\\")
	f.Add("-A OUTPUT -g SPL-SVC-AAAAAAAAAAAAAAAA -m comment --comment x")
	f.Add("-A OUTPUT -g SPL-SVC-AAAAAAAAAAAAAAAA -m comment\v--comment 0")
	f.Add("-A OUTPUT -g SPL-SVC-AAAAAAAAAAAAAAAA -m -m comment --comment x comment --comment 0")
	f.Add("-A  -g SPL-SVC-2222222222222222\n-A OTHERS -j SPL-SVC-2222222222222222")
	owns := chainNames{"SPL"}.owns
	f.Fuzz(func(t *testing.T, text string) {
		first, err := parse([]byte(text), owns)
		if err != nil || strings.Contains(text, "\r") { // no program prints these
			return
		}
		deletes, _, _ := repairJumps(nil, first.jumps)
		ours := slices.DeleteFunc(slices.Clone(first.jumps), func(j jump) bool { return !slices.Contains(builtInChains, j.chain) })
		if len(deletes) != len(ours) {
			t.Fatalf("%d jumps are deleted, want the %d of the kernel's chains", len(deletes), len(ours))
		}
		for _, j := range first.jumps {
			if !owns(j.rule.jumpsTo()) {
				t.Fatalf("%q leads to %q", j.rule, j.rule.jumpsTo())
			}
			if bare := j.rule.withoutComment(); bare.withoutComment() != bare {
				t.Fatalf("%q without comment is %q, and without one again %q", j.rule, bare, bare.withoutComment())
			}
		}
		s := newScript()
		s.add(tableNAT, &tablePart{chains: first.chains})
		second, err := parse(s.b.Bytes(), owns)
		if err != nil {
			t.Fatalf("parse what was printed: %v\n%s", err, s.b.Bytes())
		}
		if diff := cmp.Diff(first.chains, second.chains); diff != "" {
			t.Fatalf("chains (-read +printed and read):\n%s", diff)
		}
	})
}

// FuzzComment: withoutComment removes a comment with any text.
func FuzzComment(f *testing.F) {
	f.Add("plain")
	f.Add(`a "b" \ -j KUBE-SVC-A`)
	f.Fuzz(func(t *testing.T, text string) {
		r := newRule().add("-p tcp").comment("%s", text).jump("A")
		if got := r.withoutComment(); got != "-p tcp -j A" {
			t.Errorf("%q without comment = %q", r, got)
		}
		if got := r.jumpsTo(); got != "A" {
			t.Errorf("target of %q = %q, want A", r, got)
		}
		quoted := rule(`-p tcp -m comment --comment "` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text) + `" -j A`)
		if got := quoted.withoutComment(); got != "-p tcp -j A" {
			t.Errorf("%q without comment = %q", quoted, got)
		}
	})
}

// randomServices creates random Services. External addresses move between Services, but no
// two have the same address at a time.
type randomServices struct {
	dice  *rand.Rand
	taken map[int]int // which Service has which number of such an address
}

// release frees the external address of a Service.
func (s *randomServices) release(i int) {
	maps.DeleteFunc(s.taken, func(_, owner int) bool { return owner == i })
}

// take gives it another one. There are few, so that they soon get other owners.
func (s *randomServices) take(i int) (number int, ok bool) {
	number = s.dice.IntN(i + 20)
	if _, isTaken := s.taken[number]; isTaken {
		return 0, false
	}
	s.taken[number] = i
	return number, true
}

// service returns a random version of one Service.
func (s *randomServices) service(i int) *desired.Service {
	name := changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "test", Name: "web-" + strconv.Itoa(i)}, Port: "http", Protocol: v1.ProtocolTCP,
	}
	vip := func(net byte, i int) netip.Addr { return netip.AddrFrom4([4]byte{net, 96, byte(i >> 8), byte(i)}) }
	out := &desired.Service{Name: name, Protocol: desired.TCP, Port: &changetracker.ServicePort{Name: name, Port: 80}}
	for n := range []int{0, 1, 3, 20}[s.dice.IntN(4)] {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, byte(s.dice.IntN(4)), byte(n)}), 8080)
		out.Cluster = out.Cluster.With(at)
		if s.dice.IntN(3) == 0 {
			out.Local, out.OnNode = out.Local.With(at), append(out.OnNode, at.Addr())
		}
	}
	if s.dice.IntN(4) == 0 {
		out.Affinity = time.Hour
	}
	if s.dice.IntN(3) == 0 {
		out.ClusterWeights, out.LocalWeights = s.weights(out.Cluster.Len()), s.weights(out.Local.Len())
	}
	if s.dice.IntN(4) == 0 {
		out.Port.HealthCheckNodePort = uint16(20000 + i)
	}
	frontend := func(f desired.Frontend) {
		f.Scope = []desired.Scope{desired.ScopeCluster, desired.ScopeLocal}[s.dice.IntN(2)]
		f.Action, f.Masquerade = desired.Forward, desired.MasqueradeAll
		f.ShortCircuit = f.Kind != desired.ClusterIP && f.Scope == desired.ScopeLocal && out.Cluster.Len() > 0
		switch {
		case out.Cluster.Len() == 0:
			f.Action = desired.Reject
		case out.Endpoints(f.Scope).Len() == 0:
			f.Action = desired.Drop
		}
		out.Frontends = append(out.Frontends, f)
	}
	frontend(desired.Frontend{Kind: desired.ClusterIP, VIP: vip(10, i), Port: 80})
	s.release(i)
	number, ok := s.take(i)
	if !ok {
		return out
	}
	// External frontends have the same scope, as those of the Resolver.
	frontend(desired.Frontend{Kind: desired.LoadBalancer, VIP: vip(11, number), Port: 80})
	np := out.Frontends[1]
	np.Kind, np.VIP, np.Port = desired.NodePort, netip.Addr{}, uint16(30000+number)
	out.Frontends = append(out.Frontends, np)
	lb := &out.Frontends[1]
	switch s.dice.IntN(6) {
	case 0:
		lb.Restricted = true // for everybody
	case 1:
		lb.Restricted, lb.SourceRanges = true, []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
	}
	return out
}

func (s *randomServices) weights(n int) (list []uint16) {
	for range n {
		list = append(list, uint16(1+s.dice.IntN(1000)))
	}
	return list
}

func pureConfig(names proxier.Names) *Config {
	c := Config{Config: proxier.Config{Names: names}}.WithDefaults()
	return &c
}

func pureGlobals() desired.Globals {
	return desired.Globals{
		NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
	}
}

// tables is the state of a kernel.
type tables map[string]ruleset

// commit applies one table of a script, as iptables-restore does. A jump to a missing chain
// is an error.
func (k tables) commit(t *testing.T, text string) {
	t.Helper()
	table, text, _ := strings.Cut(text, "\n")
	for line := range strings.Lines(text) {
		command, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		chain, r, _ := strings.Cut(rest, " ")
		switch {
		case command == "-A":
			k[table][chain] = append(k[table][chain], rule(r))
		case command == "-X":
			delete(k[table], chain)
		case strings.HasPrefix(command, ":"):
			k[table][command[1:]] = []rule{}
		}
	}
	for chain, rules := range k[table] {
		for _, r := range rules {
			to := string(r[strings.LastIndexByte(string(r), ' ')+1:]) // of a jump; much faster than jumpsTo
			if _, ok := k[table][to]; !ok && (strings.HasPrefix(to, "KUBE-") || strings.HasPrefix(to, "SPL-")) {
				t.Fatalf("table %s: %s leads to %s, which is not there: %s", table, chain, to, r)
			}
		}
	}
}

// clean removes nil chains, which stand for deleted ones.
func clean(want map[string]ruleset) tables {
	k := tables{}
	for table, chains := range want {
		k[table] = maps.Clone(chains)
		maps.DeleteFunc(k[table], func(_ string, rules []rule) bool { return rules == nil })
	}
	return k
}

// treated returns what happens to the first packet of a connection: "translate", "refuse",
// or "". inRanges means that its source is in all source ranges.
func (k tables) treated(names chainNames, key desired.Key, inRanges bool) string {
	root := names.services()
	if !key.VIP.IsValid() {
		root = names.nodePorts()
	}
	packet := probe{key, inRanges}
	if packet.in(k[tableNAT], root, "DNAT") {
		return "translate"
	}
	if packet.in(k[tableFilter], root, "REJECT") || packet.in(k[tableFilter], root, "DROP") {
		return "refuse"
	}
	return ""
}

// probe is the first packet of a connection from outside.
type probe struct {
	key      desired.Key
	inRanges bool
}

// in reports whether the packet matches a rule with a target. It ignores probabilities,
// because any endpoint will do.
func (p probe) in(table ruleset, chain, target string) bool {
	for _, r := range table[chain] {
		if !p.meets(r) {
			continue
		}
		if to := r.jumpsTo(); to == target || table[to] != nil && p.in(table, to, target) {
			return true
		}
	}
	return false
}

func (p probe) meets(r rule) bool {
	fields := strings.Fields(string(r.withoutComment()))
	if slices.Contains(fields, "--src-type") || slices.Contains(fields, "--dst-type") {
		return false
	}
	return p.isDestined(r) && (p.inRanges || !slices.Contains(fields, "-s"))
}

// isDestined matches the destination only.
func (p probe) isDestined(r rule) bool {
	fields := strings.Fields(string(r.withoutComment()))
	for i := 1; i < len(fields); i++ {
		value := fields[i]
		switch fields[i-1] {
		case "-d":
			not := i > 1 && fields[i-2] == "!"
			if !p.key.VIP.IsValid() || p.isIn(r, value) == not {
				return false
			}
		case "--dport":
			low, high, isRange := strings.Cut(value, ":")
			if !isRange {
				high = low
			}
			from, _ := strconv.Atoi(low)
			to, _ := strconv.Atoi(high)
			if port := int(p.key.Port); port < from || port > to {
				return false
			}
		}
	}
	return true
}

func (p probe) isIn(r rule, text string) bool {
	if prefix, err := netip.ParsePrefix(text); err == nil {
		return prefix.Contains(p.key.VIP)
	}
	return matches(string(r), p.key)
}

// TestModelAfterAnyHistory: the changes of a model lead to the same chains as a new model. The
// kernel accepts each step of a change, and no packet leaks between steps if a rule matches
// it before and after the change.
func TestModelAfterAnyHistory(t *testing.T) {
	for _, names := range []proxier.Names{proxier.DefaultNames(), proxier.KubeProxyNames()} {
		for _, seed := range chance.Some(t, 1, uint64(0), 1) {
			t.Run(fmt.Sprintf("%s/seed %d", names.Instance, seed), func(t *testing.T) { followChanges(t, names, seed) })
		}
	}
}

func followChanges(t *testing.T, names proxier.Names, seed uint64) {
	t.Helper()
	const services, rounds = 150, 10
	random := &randomServices{rand.New(rand.NewPCG(seed, 1)), map[int]int{}}
	config := pureConfig(names)
	m := newModel(config, v1.IPv4Protocol, pureGlobals())
	kernel, now := clean(m.allChains()), map[int]*desired.Service{}
	for round := range rounds {
		before := maps.Clone(now)
		for _, i := range random.dice.Perm(services)[:25] {
			if s, ok := now[i]; ok && random.dice.IntN(rounds) < round { // first more Services, then fewer
				m.set(s.Name, nil)
				random.release(i)
				delete(now, i)
				continue
			}
			now[i] = random.service(i)
		}
		for _, i := range random.dice.Perm(services) { // the previous owner of an address may come later
			if s := now[i]; s != nil && s != before[i] {
				m.set(s.Name, m.planPort(s))
			}
		}
		takeSteps(t, kernel, m, before, now)
		fresh := newModel(config, v1.IPv4Protocol, pureGlobals())
		for _, s := range now {
			fresh.set(s.Name, fresh.planPort(s))
		}
		want := clean(fresh.allChains())
		if diff := cmp.Diff(want, kernel); diff != "" {
			t.Fatalf("round %d, %d services (-from scratch +by changes):\n%.3000s", round, len(now), diff)
		}
		if diff := cmp.Diff(want, clean(m.allChains())); diff != "" {
			t.Fatalf("round %d, %d services (-from scratch +everything):\n%.3000s", round, len(now), diff)
		}
		allReachable(t, kernel, m)
	}
}

// takeSteps applies one change table by table, and checks packets in between.
func takeSteps(t *testing.T, kernel tables, m *model, before, now map[int]*desired.Service) {
	t.Helper()
	want := m.changedChains()
	nat, filter := changeOf(kernel[tableNAT], want[tableNAT], false), changeOf(kernel[tableFilter], want[tableFilter], true)
	packets := map[probe]bool{}
	for i, s := range now {
		if before[i] == nil {
			continue
		}
		for _, list := range [][]desired.Frontend{s.Frontends, before[i].Frontends} {
			for j := range list {
				packets[probe{s.Key(&list[j]), false}] = true
				if list[j].Restricted {
					packets[probe{s.Key(&list[j]), true}] = true
				}
			}
		}
	}
	watched := map[probe][]string{}
	check := func() {
		for p := range packets {
			watched[p] = append(watched[p], kernel.treated(m.names, p.key, p.inRanges))
		}
	}
	check()
	for _, step := range strings.Split(compose(nat, filter).b.String(), "*")[1:] {
		kernel.commit(t, step)
		check()
	}
	for p, states := range watched {
		if first, last := states[0], states[len(states)-1]; first != "" && last != "" && slices.Contains(states, "") {
			t.Fatalf("a packet to %v, in the source ranges %v, leaks: %q", p.key, p.inRanges, states)
		}
	}
}

// allReachable checks that every chain is reachable from a built-in chain.
func allReachable(t *testing.T, kernel tables, m *model) {
	t.Helper()
	for table, chains := range kernel {
		reached := map[string]bool{}
		var visit func(chain string)
		visit = func(chain string) {
			if _, ok := chains[chain]; !ok || reached[chain] {
				return
			}
			reached[chain] = true
			for _, r := range chains[chain] {
				visit(r.jumpsTo())
			}
		}
		for _, j := range m.jumps()[table] {
			visit(j.to)
		}
		for chain := range chains {
			// These exist even if no Service needs them.
			if !reached[chain] && chain != m.names.mark() && chain != m.names.markNonPod() {
				t.Errorf("table %s: %s is not reachable", table, chain)
			}
		}
	}
}

// A change touches few chains, however many Services there are.
func TestAChangeTouchesFewChains(t *testing.T) {
	const services, changes, most = 3000, 500, 60
	random := &randomServices{rand.New(rand.NewPCG(5, 6)), map[int]int{}}
	m := newModel(pureConfig(proxier.DefaultNames()), v1.IPv4Protocol, pureGlobals())
	for i := range services {
		s := random.service(i)
		m.set(s.Name, m.planPort(s))
	}
	kernel := clean(m.allChains())
	total, longest := 0, 0
	for range changes {
		s := random.service(random.dice.IntN(services))
		if random.dice.IntN(3) == 0 {
			m.set(s.Name, nil)
		} else {
			m.set(s.Name, m.planPort(s))
		}
		touched := 0
		for table, want := range m.changedChains() {
			c := changeOf(kernel[table], want, table == tableFilter)
			for _, p := range []*tablePart{&c.first, &c.last} {
				touched += len(p.chains) + len(p.gone)
				maps.Copy(kernel[table], p.chains)
				maps.DeleteFunc(kernel[table], func(chain string, _ []rule) bool { return slices.Contains(p.gone, chain) })
			}
		}
		total, longest = total+touched, max(longest, touched)
	}
	t.Logf("%.1f chains on average, %d at most", float64(total)/changes, longest)
	if longest > most || total > changes*most/3 {
		t.Errorf("a change touches %d chains at most, %.1f on average, want %d and %d", longest, float64(total)/changes, most, most/3)
	}
}

// TestFrontendOfARule: rules of ours and of kube-proxy name the frontend that they match.
func TestFrontendOfARule(t *testing.T) {
	at := func(vip string, p desired.Protocol, port uint16) desired.Key {
		return desired.Key{VIP: netip.MustParseAddr(vip), Protocol: p, Port: port}
	}
	for text, want := range map[rule]desired.Key{
		`-d 10.96.0.10/32 -p udp -m comment --comment "kube-system/kube-dns:dns cluster IP" -m udp --dport 53 -j KUBE-SVC-TCOU7JCQXEZGVUNU`: at("10.96.0.10", desired.UDP, 53),
		`-d fd00:10:96::a/128 -p tcp -m comment --comment "-d 10.0.0.1 --dport 7" -m tcp --dport 80 -j KUBE-SVC-X`:                          at("fd00:10:96::a", desired.TCP, 80),
		`-p sctp -m sctp --dport 30080 -j KUBE-EXT-X`:                                    {Protocol: desired.SCTP, Port: 30080},
		`-d 10.96.0.0/24 -p tcp -m tcp --dport 80 -j KUBE-X`:                             {},
		`-d 10.96.0.10/32 -p tcp -m tcp --dport 80:95 -j KUBE-X`:                         {},
		`! -s 10.244.0.0/16 -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ`: {},
		`-s 10.244.0.5/32 -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j KUBE-X`:           {},
		`-d 10.96.0.10/32 -p tcp -m comment --comment "a --dport 80 "`:                   {},
		`-m statistic --mode random --probability 0.5 -j KUBE-SEP-X`:                     {},
	} {
		if got, ok := text.frontend(); ok != (want != desired.Key{}) || ok && got != want {
			t.Errorf("%s: %v, %v, want %v", text, got, ok, want)
		}
	}
}
