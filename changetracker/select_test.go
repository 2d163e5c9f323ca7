package changetracker

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/quick"
)

// endpointsFrom makes endpoints from words: each is a name of one letter, then
// flags: R ready, S serving and terminating, L local, U serving only, and hints
// as zone=x,y or node=x; M is maintenance of what the flags before it say, and group=1 the Priority.
func endpointsFrom(t *testing.T, words string) []Endpoint {
	t.Helper()
	var list []Endpoint
	for word := range strings.FieldsSeq(words) {
		parts := strings.Split(word, ":")
		e := Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, parts[0][0]}), 80)}
		for _, part := range parts[1:] {
			key, value, _ := strings.Cut(part, "=")
			switch key {
			case "R":
				e.Ready, e.Serving = true, true
			case "S":
				e.Serving, e.Terminating = true, true
			case "U":
				e.Serving = true
			case "L":
				e.Node = "here"
			case "M":
				e.Maintenance = true
				e.tidy()
			case "group":
				n, err := strconv.ParseUint(value, 10, 8)
				if err != nil {
					t.Fatal(err)
				}
				e.Priority = uint8(n)
			case "zone":
				e.ZoneHints = strings.Split(value, ",")
			case "node":
				e.NodeHints = strings.Split(value, ",")
			default:
				t.Fatalf("unknown flag %q", key)
			}
		}
		list = append(list, e)
	}
	return list
}

func letters(list []Endpoint) string {
	var text strings.Builder
	for _, e := range list {
		text.WriteByte(e.Addr.Addr().As4()[3])
	}
	return text.String()
}

// port is a service port with the policies that letters name: i internal Local, e
// external Local, x externally accessible; h asks for half of a group.
func port(policies string) *ServicePort {
	p := &ServicePort{
		ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80,
		InternalPolicyLocal: strings.Contains(policies, "i"), ExternalPolicyLocal: strings.Contains(policies, "e"),
	}
	if strings.Contains(policies, "x") {
		p.NodePort = 30000
	}
	if strings.Contains(policies, "h") {
		p.Failover.Share = 50
	}
	return p
}

func TestSelect(t *testing.T) {
	type want struct {
		cluster, local, all string
		any                 bool
	}
	for name, c := range map[string]struct {
		policies, endpoints string
		want                want
	}{
		"TOP-01 nothing":         {"", "", want{}},
		"TOP-01 nothing, local":  {"iex", "", want{}},
		"TOP-03 ready":           {"", "a:R b:R:L c", want{"ab", "b", "ab", true}},
		"TOP-03 draining":        {"", "a:S b:S:L c:U", want{"ab", "b", "ab", true}},
		"TOP-03 ready first":     {"", "a:S b:R", want{"b", "", "b", true}},
		"TOP-05 none usable":     {"x", "a:U b", want{}},
		"TOP-05 none, local":     {"ex", "a:U:L b:L", want{}},
		"TOP-04 local ready":     {"i", "a:R b:R:L c:S:L", want{"ab", "b", "b", true}},
		"TOP-04 local draining":  {"i", "a:R b:S:L c:S", want{"a", "b", "b", true}},
		"TOP-06 none local":      {"i", "a:R", want{"a", "", "", true}},
		"TOP-06 draining remote": {"i", "a:S", want{"a", "", "", true}},

		"table C C ext":            {"x", "a:R b:R:L", want{"ab", "b", "ab", true}},
		"table C L ext":            {"ex", "a:R b:R:L", want{"ab", "b", "ab", true}},
		"table C L not ext":        {"e", "a:R b:R:L", want{"ab", "b", "ab", true}},
		"table L L not ext":        {"ie", "a:R b:R:L", want{"ab", "b", "b", true}},
		"table L C ext":            {"ix", "a:R b:R:L", want{"ab", "b", "ab", true}},
		"table L L ext":            {"iex", "a:R b:R:L", want{"ab", "b", "ab", true}},
		"corner ready and local S": {"ex", "a:R b:S:L", want{"a", "b", "ab", true}},
		"corner all S, all remote": {"iex", "a:S b:S", want{"ab", "", "ab", true}},
		"corner filter and local elsewhere": {
			"ex", "a:R:zone=zone-a b:R:L:zone=zone-b", want{"a", "b", "ab", true},
		},
		"TOP-07 W-12 union in order of input": {
			"ex", "d:S:L c:R b:S:L a:R", want{"ca", "db", "dcba", true},
		},

		"TOP-08 1 hints of unready ones": {"", "a:S:zone=zone-b b:zone=zone-a c:S", want{"ac", "", "ac", true}},
		"TOP-08 2 same node":             {"", "a:R:node=here:zone=zone-b b:R:node=there:zone=zone-a", want{"a", "", "a", true}},
		"TOP-08 3 same zone":             {"", "a:R:zone=zone-a b:R:zone=zone-b c:R:zone=zone-b,zone-a", want{"ac", "", "ac", true}},
		"TOP-08 3 after 2 did not match": {"", "a:R:node=x:zone=zone-a b:R:node=y:zone=zone-b", want{"a", "", "a", true}},
		"TOP-08 4 no zone matches":       {"", "a:R:zone=zone-c b:R:zone=zone-b", want{"ab", "", "ab", true}},
		"TOP-04 hints never filter local": {
			"i", "a:R:L:zone=zone-b b:R:zone=zone-a", want{"b", "a", "a", true},
		},
		"TOP-09 one without node hint": {"", "a:R:node=here b:R", want{"ab", "", "ab", true}},
		"TOP-09 one without zone hint": {"", "a:R:zone=zone-a b:R", want{"ab", "", "ab", true}},
		"TOP-09 unready without hint":  {"", "a:R:zone=zone-a b:S c", want{"a", "", "a", true}},
		"TOP-09 unready with a hint":   {"", "a:R:zone=zone-b b:S:zone=zone-a", want{"a", "", "a", true}},

		"TOP-20 the first group":                {"", "a:R:group=1 b:R c:R:group=2", want{"b", "", "b", true}},
		"TOP-20 the next group":                 {"", "a:R:group=1 b c:R:group=2", want{"a", "", "a", true}},
		"TOP-20 groups need not begin at 0":     {"", "a:R:group=9 b:R:group=7", want{"b", "", "b", true}},
		"TOP-20 ready before draining":          {"", "a:S b:R:group=3", want{"b", "", "b", true}},
		"TOP-20 none ready":                     {"", "a b:S:group=2 c:S:group=1", want{"c", "", "c", true}},
		"TOP-20 none usable":                    {"", "a b:group=2 c:U:group=1", want{}},
		"TOP-20 policy Local in the group":      {"ex", "a:R:L:group=1 b:R", want{"b", "", "b", true}},
		"TOP-20 policy Local, draining":         {"ex", "a:R:L:group=1 b:R c:S:L d:S:L:group=1", want{"b", "c", "bc", true}},
		"TOP-20 policy Local, next group":       {"ex", "a:R:L:group=1 b", want{"a", "a", "a", true}},
		"TOP-20 hints in the group":             {"", "a:R:zone=zone-a b:R:zone=zone-b c:R:group=1", want{"a", "", "a", true}},
		"TOP-20 hints of another group":         {"", "a:R b:R:zone=zone-a:group=1", want{"a", "", "a", true}},
		"TOP-21 half is enough":                 {"h", "a:R b c:R:group=1", want{"a", "", "a", true}},
		"TOP-21 less than half":                 {"h", "a:R b c d:R:group=1", want{"d", "", "d", true}},
		"TOP-21 nobody has half":                {"h", "a:R b c d:R:group=1 e:group=1 f:group=1", want{"a", "", "a", true}},
		"TOP-21 what ends does not count":       {"h", "a:R b:S c:S d:R:M e:R:group=1", want{"a", "", "a", true}},
		"TOP-22 maintenance":                    {"", "a:R:M b:R", want{"b", "", "b", true}},
		"TOP-22 maintenance of the last one":    {"", "a:R:M", want{}},
		"TOP-22 maintenance of what terminates": {"ex", "a:S:L:M", want{}},
		"TOP-22 maintenance of a group":         {"", "a:R:M b:R:group=1", want{"b", "", "b", true}},
	} {
		t.Run(name, func(t *testing.T) {
			s := Select(port(c.policies), endpointsFrom(t, c.endpoints), Node{Name: "here", Zone: "zone-a"})
			got := want{letters(s.Cluster), letters(s.Local), letters(s.All), s.Any}
			if got != c.want {
				t.Errorf("Select = %+v, want %+v", got, c.want)
			}
		})
	}
}

func TestNodeWithoutZoneOrNameMatchesNoHint(t *testing.T) { // TOP-10
	list := endpointsFrom(t, "a:R b:R")
	list[0].ZoneHints, list[1].ZoneHints = []string{""}, []string{"zone-a"}
	list[0].NodeHints, list[1].NodeHints = []string{""}, []string{"here"}
	if got := letters(Select(port(""), list, Node{}).Cluster); got != "ab" {
		t.Errorf("Cluster = %q, want all", got)
	}
}

func TestEndpointZoneDoesNotCount(t *testing.T) { // TOP-11
	list := endpointsFrom(t, "a:R b:R")
	list[0].Zone, list[1].Zone = "zone-a", "zone-b"
	if got := letters(Select(port(""), list, Node{Zone: "zone-a"}).Cluster); got != "ab" {
		t.Errorf("Cluster = %q, want all", got)
	}
}

func TestSelectWithoutPort(t *testing.T) {
	if got := Select(nil, endpointsFrom(t, "a:R"), Node{}); !reflect.DeepEqual(got, Selection{}) {
		t.Errorf("Select(nil) = %+v, want nothing", got)
	}
}

// naiveSelect follows the specification literally.
func naiveSelect(p *ServicePort, endpoints []Endpoint, node Node) Selection {
	pick := func(rule func(Endpoint) bool) (list []Endpoint) {
		for _, e := range endpoints {
			if rule(e) {
				list = append(list, e)
			}
		}
		return list
	}
	ready := pick(func(e Endpoint) bool { return e.Ready })
	every := func(rule func(Endpoint) bool) bool {
		return !slices.ContainsFunc(ready, func(e Endpoint) bool { return !rule(e) })
	}
	sameNode := func(e Endpoint) bool { return node.Name != "" && slices.Contains(e.NodeHints, node.Name) }
	sameZone := func(e Endpoint) bool { return node.Zone != "" && slices.Contains(e.ZoneHints, node.Zone) }
	var s Selection
	switch {
	case len(ready) == 0:
		s.Cluster = pick(func(e Endpoint) bool { return e.Serving && e.Terminating })
	case every(func(e Endpoint) bool { return len(e.NodeHints) > 0 }) && slices.ContainsFunc(ready, sameNode):
		s.Cluster = pick(func(e Endpoint) bool { return e.Ready && sameNode(e) })
	case every(func(e Endpoint) bool { return len(e.ZoneHints) > 0 }) && slices.ContainsFunc(ready, sameZone):
		s.Cluster = pick(func(e Endpoint) bool { return e.Ready && sameZone(e) })
	default:
		s.Cluster = ready
	}
	local := func(e Endpoint) bool { return node.Name != "" && e.Node == node.Name }
	if s.Local = pick(func(e Endpoint) bool { return local(e) && e.Ready }); len(s.Local) == 0 {
		s.Local = pick(func(e Endpoint) bool { return local(e) && e.Serving && e.Terminating })
	}
	s.Any = len(pick(func(e Endpoint) bool { return e.Ready || e.Serving && e.Terminating })) > 0
	in := func(list []Endpoint, e Endpoint) bool {
		return slices.ContainsFunc(list, func(o Endpoint) bool { return o.Addr == e.Addr })
	}
	s.All = pick(func(e Endpoint) bool {
		return p.UsesClusterEndpoints() && in(s.Cluster, e) || p.UsesLocalEndpoints() && in(s.Local, e)
	})
	return s
}

func TestSelectIsLikeTheSpecificationReadAloud(t *testing.T) {
	law := func(seed uint64) bool {
		r := rand.New(rand.NewPCG(seed, 1))
		flip := func(odds int) bool { return r.IntN(odds) == 0 }
		hints := func(odds int) []string {
			list := []string{}
			for _, name := range []string{"", "here", "zone-a", "zone-b"} {
				if flip(odds) {
					list = append(list, name)
				}
			}
			return list
		}
		odds := 1 + r.IntN(6)
		var list []Endpoint
		for i := range r.IntN(6) {
			list = append(list, Endpoint{
				Addr:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80),
				Ready: flip(2), Serving: flip(2), Terminating: flip(2), Node: []string{"", "here", "elsewhere"}[r.IntN(3)],
				ZoneHints: hints(odds), NodeHints: hints(odds + 1),
			})
		}
		node := Node{Name: []string{"", "here"}[r.IntN(2)], Zone: []string{"", "zone-a"}[r.IntN(2)]}
		for _, policies := range []string{"", "x", "e", "ex", "i", "ie", "ix", "iex"} {
			before := fmt.Sprint(list)
			got, want := Select(port(policies), list, node), naiveSelect(port(policies), list, node)
			if letters(got.Cluster) != letters(want.Cluster) || letters(got.Local) != letters(want.Local) ||
				letters(got.All) != letters(want.All) || got.Any != want.Any {
				t.Logf("policies %q, node %+v, endpoints %v:\n got %+v\nwant %+v", policies, node, list, got, want)
				return false
			}
			if fmt.Sprint(list) != before {
				t.Log("Select changed its input")
				return false
			}
		}
		return true
	}
	if err := quick.Check(law, &quick.Config{MaxCount: 3_000}); err != nil {
		t.Error(err)
	}
}

// Budget: no allocation for a list that is the input, one for any other list
// (kube-proxy: 3 to 10 in all). Any node costs the same.
func BenchmarkSelect(b *testing.B) {
	for _, size := range []int{3, 10, 100, 1_000, 5_000} {
		var list []Endpoint
		for i := range size {
			list = append(list, Endpoint{
				Addr:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80),
				Ready: true, Serving: true, Node: fmt.Sprintf("node-%02d", i%100), ZoneHints: []string{"zone-a"},
			})
		}
		for name, p := range map[string]*ServicePort{"cluster": port(""), "local": port("ex")} {
			b.Run(fmt.Sprintf("%s/%d", name, size), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					Select(p, list, Node{Name: "node-00", Zone: "zone-a"})
				}
			})
		}
	}
}
