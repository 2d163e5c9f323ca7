package vectors_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/proxiertest/vectors"
)

var update = flag.Bool("update", false, "write v1.json")

// row is a table row. Its endpoints are words: the number of a node; then R for ready, S for terminating and serving, T for
// terminating, U for not ready, N without conditions, M with ready alone; then hints as z=zone-a,zone-b or n=node-1.
// A slash begins another EndpointSlice.
type row struct{ name, source, endpoints string }

func nodes() []vectors.Node {
	return []vectors.Node{{Name: "node-1", Zone: "zone-a"}, {Name: "node-2", Zone: "zone-b"}, {Name: "node-3"}}
}

// The sources of the rules.
const conditions, draining, zones, hosts = "EndpointConditions", "KEP-1669", "KEP-2433", "KEP-3015"

func rows() []row {
	return []row{
		{"none", conditions, ""},
		{"one ready", conditions, "1:R"},
		{"ready ones on three nodes", conditions, "1:R 2:R 3:R"},
		{"several on each node", conditions, "1:R 1:R 2:R 2:R"},
		{"not ready", conditions, "1:U 2:U"},
		{"ready and not ready", conditions, "1:R 1:U 2:U"},
		{"without conditions means ready", conditions, "1:N 2:N"},
		{"ready alone means serving too", conditions, "1:M 2:U"},
		{"in two slices", conditions, "1:R 2:R / 1:R 2:U"},
		{"the same in two slices", conditions, "1:R / =1"},
		{"all terminate and serve", draining, "1:S 2:S"},
		{"terminating ones beside ready ones", draining, "1:S 1:R 2:S"},
		{"the last of node-1 terminates", draining, "1:S 2:R"},
		{"the last of node-1 terminates and serves no more", draining, "1:T 2:R"},
		{"all terminate, some serve", draining, "1:T 2:S 2:T"},
		{"all terminate, none serves", draining, "1:T 2:T"},
		{"terminating ones beside those that are not ready", draining, "1:S 1:U 2:U"},
		{"terminating ones in another slice", draining, "1:S / 2:S 2:U"},
		{"a zone for each", zones, "1:R:z=zone-a 2:R:z=zone-b"},
		{"hints, not the zone of the endpoint, count", zones, "1:R:z=zone-b 2:R:z=zone-a"},
		{"several zones in a hint", zones, "1:R:z=zone-a,zone-b 2:R:z=zone-b"},
		{"one has no hint", zones, "1:R:z=zone-a 2:R:z=zone-b 3:R"},
		{"one that is not ready has no hint", zones, "1:R:z=zone-a 2:R:z=zone-b 2:U"},
		{"one that terminates has no hint", zones, "1:R:z=zone-a 2:R:z=zone-b 2:S"},
		{"no endpoint for a zone", zones, "1:R:z=zone-a 2:R:z=zone-a"},
		{"the only endpoint of a zone is not ready", zones, "1:U:z=zone-a 2:R:z=zone-b"},
		{"the only endpoint of a zone terminates", zones, "1:S:z=zone-a 2:R:z=zone-b"},
		{"hints of terminating ones do not count", zones, "1:S:z=zone-a 2:S:z=zone-b"},
		{"hints for a zone of no node", zones, "1:R:z=zone-x 2:R:z=zone-x"},
		{"in two slices, one without hints", zones, "1:R:z=zone-a / 2:R"},
		{"a node for each", hosts, "1:R:n=node-1 2:R:n=node-2"},
		{"node hints before zone hints", hosts, "1:R:n=node-1:z=zone-b 2:R:n=node-2:z=zone-a"},
		{"zone hints where no node hint matches", hosts, "1:R:n=node-x:z=zone-a 2:R:n=node-y:z=zone-b"},
		{"one has no node hint", hosts, "1:R:n=node-1 2:R"},
		{"one has no node hint, all have zone hints", hosts, "1:R:n=node-1:z=zone-a 2:R:z=zone-b"},
		{"one that is not ready has no node hint", hosts, "1:R:n=node-1 2:R:n=node-2 2:U"},
		{"no endpoint for a node", hosts, "1:R:n=node-1 2:R:n=node-1"},
		{"several nodes in a hint", hosts, "1:R:n=node-1,node-2 2:R:n=node-2"},
		{"the only endpoint of a node terminates", hosts, "1:S:n=node-1 2:R:n=node-2"},
	}
}

// policies are those of a Service: internal, external.
func policies() [][2]bool {
	return [][2]bool{{false, false}, {true, false}, {false, true}, {true, true}}
}

// service returns a Service of both IP families with a node port, and two ports.
func service(local [2]bool) *v1.Service {
	options := []proxiertest.ServiceOption{
		proxiertest.ClusterIPs("10.96.0.1", "fd00:96::1"), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30080), proxiertest.NodePort("dns", v1.ProtocolUDP, 53, 30053),
	}
	if local[0] {
		options = append(options, proxiertest.InternalPolicyLocal())
	}
	if local[1] {
		options = append(options, proxiertest.ExternalPolicyLocal())
	}
	s := proxiertest.Service("shop", "web", options...)
	s.APIVersion, s.Kind = "v1", "Service"
	return s
}

// slices returns the EndpointSlices of a row. Port dns, and most rows, have endpoints in IPv4 only.
func slices(t *testing.T, r row) (all []*discovery.EndpointSlice) {
	t.Helper()
	families := []discovery.AddressType{discovery.AddressTypeIPv4}
	if r.source == conditions {
		families = append(families, discovery.AddressTypeIPv6)
	}
	for i, text := range strings.Split(r.endpoints, "/") {
		for _, family := range families {
			options := []proxiertest.SliceOption{
				proxiertest.SliceName(fmt.Sprintf("web-%s-%d", strings.ToLower(string(family)), i+1)), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
			}
			if family == discovery.AddressTypeIPv4 {
				options = append(options, proxiertest.SlicePort("dns", v1.ProtocolUDP, 5353))
			}
			for j, word := range strings.Fields(text) {
				options = append(options, endpoint(t, family, i, j, word))
			}
			s := proxiertest.Slice("shop", "web", family, options...)
			s.APIVersion, s.Kind = "discovery.k8s.io/v1", "EndpointSlice"
			all = append(all, s)
		}
	}
	return all
}

func endpoint(t *testing.T, family discovery.AddressType, slice, number int, word string) proxiertest.SliceOption {
	t.Helper()
	if at, again := strings.CutPrefix(word, "="); again { // that of the first slice
		slice, word = 0, at+":R"
	}
	parts := strings.Split(word, ":")
	address := fmt.Sprintf("10.244.%s.%d", parts[0], 1+10*slice+number)
	if family == discovery.AddressTypeIPv6 {
		address = fmt.Sprintf("fd00:244:%s::%d", parts[0], 1+10*slice+number)
	}
	yes, no := true, false
	return proxiertest.Endpoint(address, proxiertest.OnNode("node-"+parts[0]), func(e *discovery.Endpoint) {
		set := func(ready, serving, terminating *bool) {
			e.Conditions = discovery.EndpointConditions{Ready: ready, Serving: serving, Terminating: terminating}
		}
		for _, part := range parts[1:] {
			kind, value, _ := strings.Cut(part, "=")
			switch kind {
			case "R":
				set(&yes, &yes, &no)
			case "S":
				set(&no, &yes, &yes)
			case "T":
				set(&no, &no, &yes)
			case "U":
				set(&no, &no, &no)
			case "N":
				set(nil, nil, nil)
			case "M":
				set(&yes, nil, nil)
			case "z", "n":
				if e.Hints == nil {
					e.Hints = &discovery.EndpointHints{}
				}
				for name := range strings.SplitSeq(value, ",") {
					if kind == "z" {
						e.Hints.ForZones = append(e.Hints.ForZones, discovery.ForZone{Name: name})
					} else {
						e.Hints.ForNodes = append(e.Hints.ForNodes, discovery.ForNode{Name: name})
					}
				}
			default:
				t.Fatalf("unknown word %q", part)
			}
		}
	})
}

// generate makes the vectors from the table.
func generate(t *testing.T) table {
	t.Helper()
	set := table{nodes: nodes()}
	for _, r := range rows() {
		for _, local := range policies() {
			words := map[bool]string{true: "Local", false: "Cluster"}
			v := vectors.Vector{
				Name:   fmt.Sprintf("%s; internal %s, external %s", r.name, words[local[0]], words[local[1]]),
				Source: r.source, Service: raw(t, service(local)),
			}
			for _, s := range slices(t, r) {
				v.EndpointSlices = append(v.EndpointSlices, raw(t, s))
			}
			for _, n := range set.nodes {
				v.Want = append(v.Want, choose(t, &v, n)...)
			}
			set.vectors = append(set.vectors, v)
		}
	}
	return set
}

// write returns a set as JSON, with a line for each vector.
func write(t *testing.T, set table) string {
	t.Helper()
	lines := []string{}
	for _, v := range set.vectors {
		lines = append(lines, string(raw(t, v)))
	}
	return fmt.Sprintf("{\"version\":1,\"nodes\":%s,\"vectors\":[\n%s\n]}\n", raw(t, set.nodes), strings.Join(lines, ",\n"))
}

func raw(t *testing.T, value any) json.RawMessage {
	t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestTheVectorsAreThoseOfTheTable: v1.json has what the table and this module's choice of endpoints say.
func TestTheVectorsAreThoseOfTheTable(t *testing.T) {
	t.Parallel()
	text := write(t, generate(t))
	if *update {
		if err := os.WriteFile("v1.json", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile("v1.json")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(have), text); diff != "" {
		t.Errorf("v1.json (-have +want); -update writes it:\n%s", diff)
	}
}
