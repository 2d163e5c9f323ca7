package vectors_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"reflect"
	goslices "slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxiertest/vectors"
)

// decode returns the objects of a vector.
func decode(t *testing.T, v *vectors.Vector) (s *v1.Service, all []*discovery.EndpointSlice) {
	t.Helper()
	err := json.Unmarshal(v.Service, &s)
	for _, text := range v.EndpointSlices {
		var slice *discovery.EndpointSlice
		if err == nil {
			err = json.Unmarshal(text, &slice)
		}
		all = append(all, slice)
	}
	if err != nil {
		t.Fatalf("%s: %v", v.Name, err)
	}
	return s, all
}

// choose is this module's choice on a node.
func choose(t *testing.T, v *vectors.Vector, n vectors.Node) (all []vectors.Want) {
	t.Helper()
	s, endpointSlices := decode(t, v)
	return choiceOf(t, s, endpointSlices, n)
}

func choiceOf(t *testing.T, s *v1.Service, endpointSlices []*discovery.EndpointSlice, n vectors.Node) (all []vectors.Want) {
	t.Helper()
	node := changetracker.Node{Name: n.Name, Zone: n.Zone}
	tracker, err := changetracker.New(changetracker.Options{Node: node})
	if err != nil {
		t.Fatal(err)
	}
	tracker.Services.Update(nil, s)
	for _, slice := range endpointSlices {
		tracker.Endpoints.EndpointSliceUpdate(slice, false)
	}
	resolver := desired.Resolver{Node: node}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		err := tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			for name := range delta.After.All() {
				is, _ := resolver.Resolve(delta.After, name)
				want := vectors.Want{Node: n.Name, Port: name.Port, Protocol: string(name.Protocol), Family: string(family)}
				to := map[desired.Kind]*vectors.Chosen{desired.ClusterIP: &want.Internal, desired.NodePort: &want.External}
				for i := range is.Frontends {
					*to[is.Frontends[i].Kind] = choice(is, &is.Frontends[i], delta.After, node)
				}
				all = append(all, want)
			}
			return nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	goslices.SortFunc(all, func(a, b vectors.Want) int { return strings.Compare(a.Port+a.Family, b.Port+b.Family) })
	return all
}

func choice(s *desired.Service, f *desired.Frontend, state *changetracker.State, node changetracker.Node) vectors.Chosen {
	reasons := map[changetracker.Exclusion]string{
		changetracker.ExcludedNotReady: "not-ready", changetracker.ExcludedNotServing: "not-serving", changetracker.ExcludedDraining: "draining",
		changetracker.ExcludedElsewhere: "elsewhere", changetracker.ExcludedByNodeHint: "node-hint", changetracker.ExcludedByZoneHint: "zone-hint",
	}
	c := vectors.Chosen{Action: strings.ToLower(f.Action.String())}
	for endpoint := range s.Endpoints(f.Scope).All() {
		c.Endpoints = append(c.Endpoints, endpoint.String())
	}
	goslices.Sort(c.Endpoints)
	explain := changetracker.ExplainCluster
	if f.Scope == desired.ScopeLocal {
		explain = changetracker.ExplainLocal
	}
	endpoints := state.Endpoints(s.Name)
	why, _ := explain(s.Port, endpoints, node)
	for i, reason := range why {
		if reason != "" {
			if c.LeftOut == nil {
				c.LeftOut = map[string]string{}
			}
			c.LeftOut[endpoints[i].Addr.String()] = reasons[reason]
		}
	}
	return c
}

// table is what v1.json has.
type table struct {
	nodes   []vectors.Node
	vectors []vectors.Vector
}

func load(t *testing.T) (all table) {
	t.Helper()
	var err error
	if all.nodes, all.vectors, err = vectors.Load(); err != nil {
		t.Fatal(err)
	}
	return all
}

// found returns the vectors that a choice of endpoints gets wrong.
func found(t *testing.T, set table, choose func(*v1.Service, []*discovery.EndpointSlice, vectors.Node) []vectors.Want) (wrong []string) {
	t.Helper()
	for i := range set.vectors {
		v := &set.vectors[i]
		var got []vectors.Want
		for _, n := range set.nodes {
			s, all := decode(t, v)
			got = append(got, choose(s, all, n)...)
		}
		if !reflect.DeepEqual(got, v.Want) {
			wrong = append(wrong, v.Name)
		}
	}
	return wrong
}

// TestWrongChoicesAreFound: each mistake that a program may make fails some vectors.
func TestWrongChoicesAreFound(t *testing.T) {
	t.Parallel()
	set := load(t)
	each := func(change func(*discovery.Endpoint)) func(*v1.Service, []*discovery.EndpointSlice, *vectors.Node) {
		return func(_ *v1.Service, all []*discovery.EndpointSlice, _ *vectors.Node) {
			for _, s := range all {
				for i := range s.Endpoints {
					change(&s.Endpoints[i])
				}
			}
		}
	}
	is := func(b *bool) bool { return b != nil && *b }
	for name, mistake := range map[string]func(*v1.Service, []*discovery.EndpointSlice, *vectors.Node){
		"no hints": each(func(e *discovery.Endpoint) { e.Hints = nil }),
		"no node hints": each(func(e *discovery.Endpoint) {
			if e.Hints != nil {
				e.Hints.ForNodes = nil
			}
		}),
		"no zone hints": each(func(e *discovery.Endpoint) {
			if e.Hints != nil {
				e.Hints.ForZones = nil
			}
		}),
		"one zone of each hint": each(func(e *discovery.Endpoint) {
			if e.Hints != nil && len(e.Hints.ForZones) > 1 {
				e.Hints.ForZones = e.Hints.ForZones[:1]
			}
		}),
		"serving means ready": each(func(e *discovery.Endpoint) {
			if is(e.Conditions.Serving) {
				e.Conditions.Ready = e.Conditions.Serving
			}
		}),
		"no terminating ones": each(func(e *discovery.Endpoint) {
			if is(e.Conditions.Terminating) {
				e.Conditions.Serving = new(bool)
			}
		}),
		"no conditions means not ready": each(func(e *discovery.Endpoint) {
			if e.Conditions.Ready == nil {
				e.Conditions.Ready = new(bool)
			}
		}),
		"zone of the endpoint": each(func(e *discovery.Endpoint) {
			if e.Hints != nil && len(e.Hints.ForZones) > 0 {
				for _, n := range nodes() {
					if n.Name == *e.NodeName {
						e.Hints.ForZones = []discovery.ForZone{{Name: n.Zone}}
					}
				}
			}
		}),
		"ready ones without hints keep to no zone": each(func(e *discovery.Endpoint) {
			if e.Hints == nil {
				e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "zone-x"}}}
			}
		}),
		"internal policy": func(s *v1.Service, _ []*discovery.EndpointSlice, _ *vectors.Node) { s.Spec.InternalTrafficPolicy = nil },
		"external policy": func(s *v1.Service, _ []*discovery.EndpointSlice, _ *vectors.Node) { s.Spec.ExternalTrafficPolicy = "" },
		"other slices": func(_ *v1.Service, all []*discovery.EndpointSlice, _ *vectors.Node) {
			for _, s := range all {
				if !strings.HasSuffix(s.Name, "-1") {
					s.Endpoints = nil
				}
			}
		},
		"zone of the node": func(_ *v1.Service, _ []*discovery.EndpointSlice, n *vectors.Node) { n.Zone = "" },
		"name of the port": func(_ *v1.Service, all []*discovery.EndpointSlice, _ *vectors.Node) {
			for _, s := range all {
				s.Ports = s.Ports[:1]
			}
		},
	} {
		wrong := found(t, set, func(s *v1.Service, all []*discovery.EndpointSlice, n vectors.Node) []vectors.Want {
			mistake(s, all, &n)
			return choiceOf(t, s, all, n)
		})
		t.Logf("%s: %d of %d vectors are wrong", name, len(wrong), len(set.vectors))
		if len(wrong) == 0 {
			t.Errorf("no vector finds a choice without: %s", name)
		}
	}
	reject := found(t, set, func(s *v1.Service, all []*discovery.EndpointSlice, n vectors.Node) []vectors.Want {
		got := choiceOf(t, s, all, n)
		for i := range got {
			for _, c := range []*vectors.Chosen{&got[i].Internal, &got[i].External} {
				c.Action = strings.Replace(c.Action, "drop", "reject", 1)
			}
		}
		return got
	})
	if len(reject) == 0 {
		t.Error("no vector finds that drop is taken for reject")
	}
}

// TestAnotherLanguage: choose.py, which knows the rules and nothing of this module, agrees with every vector.
func TestAnotherLanguage(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil && os.Getenv("SERVICEPLANE_REQUIRE_KERNEL") != "1" {
		t.Skip(err)
	}
	out, err := exec.CommandContext(t.Context(), python, "choose.py", "v1.json").CombinedOutput()
	if err != nil {
		t.Fatalf("choose.py: %v\n%s", err, out)
	}
	t.Logf("%s", out)
}
