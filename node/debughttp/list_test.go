package debughttp_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"net/url"
	"reflect"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// judgedProxy has a Service for each verdict.
func judgedProxy(t *testing.T) http.Handler {
	t.Helper()
	p := newProxy(t, func(c *proxier.Config, _ *proxier.Deps) {
		c.Tracker.DecorateService = func(p *changetracker.ServicePort, s *v1.Service) {
			if s.Annotations["balancing"] != "" {
				p.Balancing = changetracker.SourceHash
			}
		}
	})
	add := func(name, clusterIP string, slice []proxiertest.SliceOption, options ...proxiertest.ServiceOption) {
		options = append(options, proxiertest.ClusterIPs(clusterIP), proxiertest.NodePort("http", v1.ProtocolTCP, 80, 30000+int32(clusterIP[len(clusterIP)-1])))
		p.OnServiceAdd(proxiertest.Service("shop", name, options...))
		slice = append(slice, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080))
		p.OnEndpointSliceAdd(proxiertest.Slice("shop", name, discovery.AddressTypeIPv4, slice...))
	}
	here := []proxiertest.SliceOption{proxiertest.Endpoint("10.244.1.5", proxiertest.OnNode("node-1"))}
	there := []proxiertest.SliceOption{proxiertest.Endpoint("10.244.2.5", proxiertest.OnNode("node-2"))}
	add("works", "10.96.0.1", here, func(s *v1.Service) { s.Annotations = map[string]string{"balancing": "source-hash"} })
	add("no-endpoints", "10.96.0.2", nil, proxiertest.ClientAffinity(1e9))
	add("drops-outside", "10.96.0.3", there, proxiertest.ExternalPolicyLocal())
	add("drops-all", "10.96.0.4", there, proxiertest.ExternalPolicyLocal(), proxiertest.InternalPolicyLocal())
	add("rejects-some", "10.96.0.5", here, proxiertest.Port("admin", v1.ProtocolTCP, 81))
	add("lost-one", "10.96.0.6", here, proxiertest.ExternalIPs("10.96.0.1"))
	add("broken", "10.96.0.7", here)
	name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: "broken"}, Port: "http", Protocol: v1.ProtocolTCP}
	p.engines[v1.IPv4Protocol].Refuse(name, errors.New("no room"))
	p.run(t)
	p.sync(t)
	return debughttp.Handler(p)
}

func TestServicesHaveAVerdict(t *testing.T) {
	h := judgedProxy(t)
	a := get(t, h, "/services", http.StatusOK)
	got := map[string]any{}
	for i, name := range servicesOf(t, a) {
		got[strings.TrimPrefix(name, "shop/")] = at(t, a, "services", i, "verdict")
	}
	want := map[string]any{
		"works": "works", "no-endpoints": "no endpoints", "drops-outside": "partly drops", "drops-all": "drops", "rejects-some": "partly rejects",
		"lost-one": "works", "broken": "failed",
	}
	if !maps.Equal(got, want) {
		t.Errorf("the verdicts are %v, want %v", got, want)
	}
}

func TestServicesAreFiltered(t *testing.T) {
	h := judgedProxy(t)
	for query, want := range map[string]string{
		"filter=failed":                      "broken",
		"filter=no-endpoints":                "no-endpoints rejects-some",
		"filter=dropping":                    "drops-all drops-outside",
		"filter=lost":                        "lost-one",
		"filter=ejected":                     "",
		"filter=balancing":                   "works",
		"filter=affinity":                    "no-endpoints",
		"filter=affinity,no-endpoints":       "no-endpoints",
		"filter=affinity&filter=balancing":   "",
		"filter=dropping&q=outside":          "drops-outside",
		"filter=no-endpoints&namespace=shop": "no-endpoints rejects-some",
		"filter=&namespace=load":             "",
	} {
		a := get(t, h, "/services?"+query, http.StatusOK)
		if got := strings.ReplaceAll(strings.Join(servicesOf(t, a), " "), "shop/", ""); got != want {
			t.Errorf("services?%s are %q, want %q", query, got, want)
		}
		wantAt(t, a, fmt.Sprint(len(strings.Fields(want))), "total")
	}
	// The counts are those of the search and the namespace, whatever the filters are.
	a := get(t, h, "/services?filter=failed", http.StatusOK)
	wantAt(t, a, `{"affinity":1,"all":7,"balancing":1,"dropping":2,"ejected":0,"external":7,"failed":1,"lost":1,"no-endpoints":2}`, "counts")
	a = get(t, h, "/services?q=drops&filter=failed", http.StatusOK)
	wantAt(t, a, `{"affinity":0,"all":2,"balancing":0,"dropping":2,"ejected":0,"external":2,"failed":0,"lost":0,"no-endpoints":0}`, "counts")
	text, _ := at(t, get(t, h, "/services?filter=nonsense", http.StatusBadRequest), "error").(string)
	if !strings.Contains(text, "parameter filter") || !strings.Contains(text, "no-endpoints") {
		t.Errorf("the error is %q, want the parameter and its values", text)
	}
}

func TestBestMatchesComeFirst(t *testing.T) {
	p := newProxy(t)
	for i, name := range []string{"web-10", "web-2", "web", "old-web", "api", "web-02"} {
		p.OnServiceAdd(proxiertest.Service("shop", name, proxiertest.ClusterIPs(fmt.Sprintf("10.96.0.%d", i+1)),
			proxiertest.NodePort("", v1.ProtocolTCP, 80, 30001+int32(i)*100)))
	}
	p.OnServiceAdd(proxiertest.Service("a", "cobweb", proxiertest.ClusterIPs("10.96.0.11"), proxiertest.Port("", v1.ProtocolTCP, 80)))
	p.run(t)
	p.sync(t)
	h := debughttp.Handler(p)
	for q, want := range map[string]string{
		"":             "cobweb api old-web web web-02 web-2 web-10",
		"web":          "web web-02 web-2 web-10 cobweb old-web",
		"shop/web-2":   "web-2",
		"10.96.0.1":    "web-10 cobweb",
		"10.96.0.1:80": "web-10",
		"3000":         "web-10",
		"30101":        "web-2",
		"1":            "cobweb api old-web web web-02 web-2 web-10",
	} {
		a := get(t, h, "/services?q="+url.QueryEscape(q), http.StatusOK)
		names := servicesOf(t, a)
		for i := range names {
			_, names[i], _ = strings.Cut(names[i], "/")
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("services?q=%s are %q, want %q", q, got, want)
		}
		// The same one by one.
		for i, name := range names {
			one := servicesOf(t, get(t, h, fmt.Sprintf("/services?q=%s&offset=%d&limit=1", url.QueryEscape(q), i), http.StatusOK))
			if len(one) != 1 || !strings.HasSuffix(one[0], "/"+name) {
				t.Errorf("services?q=%s&offset=%d&limit=1 are %v, want %s", q, i, one, name)
			}
		}
	}
}

// A Handler that has followed all changes answers like a new one.
func TestListFollowsRandomChanges(t *testing.T) {
	for seed := range uint64(4) {
		r := rand.New(rand.NewPCG(seed, 40))
		p := newProxy(t)
		p.run(t)
		h := debughttp.Handler(p)
		for range 60 {
			for range 1 + r.IntN(4) {
				p.changeAtRandom(r)
			}
			p.sync(t)
			for _, query := range []string{"", "?q=10.244", "?filter=dropping", "?filter=no-endpoints&q=1", "?filter=lost"} {
				got, want := get(t, h, "/services"+query, http.StatusOK), get(t, debughttp.Handler(p), "/services"+query, http.StatusOK)
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("seed %d: services%s is\n%s\nwant\n%s", seed, query, compact(t, got), compact(t, want))
				}
			}
			if got, want := get(t, h, "/namespaces", http.StatusOK), get(t, debughttp.Handler(p), "/namespaces", http.StatusOK); !reflect.DeepEqual(got, want) {
				t.Fatalf("seed %d: namespaces is %v, want %v", seed, got, want)
			}
		}
	}
}

func (p *proxy) changeAtRandom(r *rand.Rand) {
	n := r.IntN(12)
	namespace, name := []string{"a", "b"}[n%2], fmt.Sprint("service-", n)
	switch r.IntN(8) {
	case 0:
		p.OnServiceDelete(proxiertest.Service(namespace, name))
	case 1:
		p.OnEndpointSliceDelete(proxiertest.Slice(namespace, name, discovery.AddressTypeIPv4))
	case 2:
		node := changetracker.Node{Name: []string{"node-1", "node-2"}[r.IntN(2)], Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10")}}
		p.Tracker().SetNode(node)
		p.Trigger()
	case 3, 4, 5:
		options := []proxiertest.ServiceOption{
			proxiertest.ClusterIPs(fmt.Sprintf("10.96.0.%d", n)), proxiertest.NodePort("", v1.ProtocolTCP, 80, 30000+int32(n)),
		}
		if r.IntN(2) == 0 { // several Services claim it
			options = append(options, proxiertest.ExternalIPs(fmt.Sprintf("10.96.0.%d", r.IntN(12))))
		}
		if r.IntN(2) == 0 {
			options = append(options, proxiertest.ExternalPolicyLocal())
		}
		p.OnServiceAdd(proxiertest.Service(namespace, name, options...))
	default:
		options := []proxiertest.SliceOption{proxiertest.SlicePort("", v1.ProtocolTCP, 8080)}
		for e := range r.IntN(3) {
			options = append(options, proxiertest.Endpoint(fmt.Sprintf("10.244.%d.%d", e, n), proxiertest.OnNode(fmt.Sprint("node-", 1+r.IntN(2)))))
		}
		p.OnEndpointSliceAdd(proxiertest.Slice(namespace, name, discovery.AddressTypeIPv4, options...))
	}
}

func TestNamespacesAreCounted(t *testing.T) {
	p, h := webProxy(t)
	for _, name := range []string{"a", "b"} {
		p.OnServiceAdd(proxiertest.Service("ns-10", name, proxiertest.ClusterIPs("10.96.1."+fmt.Sprint(name[0])), proxiertest.Port("", v1.ProtocolTCP, 80)))
	}
	p.OnServiceAdd(proxiertest.Service("ns-9", "c", proxiertest.ClusterIPs("10.96.1.1"), proxiertest.Port("", v1.ProtocolTCP, 80)))
	p.sync(t)
	wantAt(t, get(t, h, "/namespaces", http.StatusOK),
		`[{"name":"ns-9","services":1},{"name":"ns-10","services":2},{"name":"shop","services":1}]`, "namespaces")
}

func TestListIsEmptyBeforeTheFirstSync(t *testing.T) {
	h := debughttp.Handler(newProxy(t))
	a := get(t, h, "/services", http.StatusOK)
	wantAt(t, a, `[]`, "services")
	wantAt(t, a, `0`, "counts", "all")
	wantAt(t, get(t, h, "/namespaces", http.StatusOK), `[]`, "namespaces")
}
