package debughttp_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// webProxy returns a proxy with one programmed Service.
func webProxy(t *testing.T, change ...func(*proxier.Config, *proxier.Deps)) (*proxy, http.Handler) {
	t.Helper()
	p := newProxy(t, change...)
	p.OnServiceAdd(webService())
	p.OnEndpointSliceAdd(webSlice())
	p.OnEndpointSliceAdd(webSlice6())
	p.run(t)
	p.sync(t)
	return p, debughttp.Handler(p)
}

func TestStatusTellsOfHealthAndProblems(t *testing.T) {
	p := newProxy(t)
	h := debughttp.Handler(p, debughttp.Title("edge proxy"))
	before := get(t, h, "/status", http.StatusOK)
	wantAt(t, before, `false`, "synced")
	wantAt(t, before, `"edge proxy"`, "title")
	wantAt(t, before, `[]`, "families", 0, "failed")
	wantAt(t, before, `null`, "families", 0, "lastAttempt")

	name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP}
	p.engines[v1.IPv4Protocol].Refuse(name, errors.New("the kernel <says> no"))
	service := webService()
	service.Spec.ExternalIPs = append(service.Spec.ExternalIPs, "<b>nonsense</b>")
	p.OnServiceAdd(service)
	p.OnEndpointSliceAdd(webSlice())
	p.run(t)
	p.sync(t)
	after := get(t, h, "/status", http.StatusOK)
	wantAt(t, after, `true`, "synced")
	wantAt(t, after, `"IPv4"`, "families", 0, "family")
	wantAt(t, after, `1`, "families", 0, "failedTotal")
	wantAt(t, after, `[{"error":"the kernel <says> no","name":"web","namespace":"shop","portName":"http","protocol":"TCP"}]`, "families", 0, "failed")
	wantAt(t, after, `null`, "families", 0, "lastError")
	wantAt(t, after, `null`, "families", 1, "lastError")
	wantAt(t, after, `{"addresses":["192.0.2.10","2001:db8::10"],"name":"node-1","podCIDRs":[],"zone":"zone-a"}`, "node")
	wantAt(t, after, `[]`, "conditions")
	wantAt(t, after, `["Conntrack","Health"]`, "without")
	wantAt(t, after, `"<b>nonsense</b>"`, "problems", 0, "value")
	for _, path := range [][]any{{"now"}, {"lastQueued"}, {"families", 0, "lastAttempt"}, {"families", 1, "lastSuccess"}} {
		text, _ := at(t, after, path...).(string)
		if parsed, err := time.Parse(time.RFC3339Nano, text); err != nil || parsed.Location() != time.UTC {
			t.Errorf("%v = %q, want a time in UTC (%v)", path, text, err)
		}
	}
}

func TestStatusIsLimited(t *testing.T) {
	source := &fakeSource{status: proxier.Status{
		Problems: slices.Repeat([]changetracker.Problem{{Object: "Service a/b"}}, 300),
		Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: {
			LastError:  errors.New("x" + strings.Repeat("ä", 100_000)),
			Failed:     slices.Repeat([]*proxier.ServiceError{{Err: errors.New("x")}}, 300),
			Damaged:    2,
			LastDamage: proxier.Damage{Object: "chain x", By: "nft"}, LastDamageTime: time.Unix(1, 5),
		}},
		Conditions: []proxier.Condition{{Type: proxier.ConditionContested, Family: v1.IPv4Protocol, Message: "m", Since: time.Unix(2, 0)}},
	}}
	h := debughttp.Handler(source)
	for query, want := range map[string]int{"": 100, "?limit=7": 7, "?limit=1000": 300} {
		a := get(t, h, "/status"+query, http.StatusOK)
		problems, _ := at(t, a, "problems").([]any)
		failed, _ := at(t, a, "families", 0, "failed").([]any)
		if len(problems) != want || len(failed) != want {
			t.Errorf("status%s has %d problems and %d failures, want %d", query, len(problems), len(failed), want)
		}
		wantAt(t, a, `300`, "problemsTotal")
		wantAt(t, a, `300`, "families", 0, "failedTotal")
		wantAt(t, a, `{"by":"nft","object":"chain x","time":"1970-01-01T00:00:01.000000005Z"}`, "families", 0, "lastDamage")
		wantAt(t, a, `[{"family":"IPv4","message":"m","since":"1970-01-01T00:00:02Z","type":"Contested"}]`, "conditions")
		text, _ := at(t, a, "families", 0, "lastError").(string)
		if len(text) > 2100 || strings.ReplaceAll(text, "ä", "") != "x…" {
			t.Errorf("lastError has %d bytes and ends in %q, want whole letters, cut", len(text), text[len(text)-6:])
		}
	}
}

func TestServicesAreFoundByWhatTheyHave(t *testing.T) {
	p, h := webProxy(t)
	p.OnServiceAdd(proxiertest.Service("default", "api", proxiertest.ClusterIPs("10.96.0.77"), proxiertest.Port("", v1.ProtocolUDP, 53)))
	p.OnServiceAdd(proxiertest.Service("default", "Zoo", proxiertest.ClusterIPs("10.96.0.78"), proxiertest.Port("", v1.ProtocolTCP, 80)))
	p.sync(t)
	for q, want := range map[string]string{
		"":                    "default/Zoo default/api shop/web",
		"WEB":                 "shop/web",
		"zoo":                 "default/Zoo",
		"shop/w":              "shop/web",
		"p/w":                 "shop/web",
		" default ":           "default/Zoo default/api",
		"10.96.0.7":           "default/Zoo default/api",
		"FD00:96::":           "shop/web",
		"198.51.100.10":       "shop/web",
		"198.51.100.20":       "shop/web",
		"3008":                "shop/web",
		"10.244.2.6":          "shop/web",
		"fd00:244:1::5":       "shop/web",
		"10.96.0.10:80":       "shop/web",
		"10.96.0.10:81":       "",
		"[fd00:96::10]:80":    "shop/web",
		"10.244.1.5:8080":     "shop/web",
		"8080":                "",
		"10.96.0.10.":         "",
		"<script>":            "",
		"nothing has this 10": "",
	} {
		a := get(t, h, "/services?q="+url.QueryEscape(q), http.StatusOK)
		if got := strings.Join(servicesOf(t, a), " "); got != want {
			t.Errorf("services?q=%s are %q, want %q", q, got, want)
		}
		wantAt(t, a, fmt.Sprint(len(strings.Fields(want))), "total")
	}
}

func servicesOf(t *testing.T, answer any) (names []string) {
	t.Helper()
	services, _ := at(t, answer, "services").([]any)
	for _, s := range services {
		names = append(names, fmt.Sprint(at(t, s, "namespace"), "/", at(t, s, "name")))
	}
	return names
}

func TestServiceSummaryHasItsPorts(t *testing.T) {
	_, h := webProxy(t)
	a := get(t, h, "/services", http.StatusOK)
	wantAt(t, a, `{"clusterIP":"10.96.0.10","endpointsAll":3,"endpointsUsable":2,"externalIPs":["198.51.100.20"],`+
		`"externalTrafficPolicy":"Local","family":"IPv4","internalTrafficPolicy":"Cluster","loadBalancerVIPs":["198.51.100.10"],`+
		`"nodePort":30080,"port":80,"portName":"http","protocol":"TCP","sessionAffinitySeconds":3600}`, "services", 0, "servicePorts", 0)
	wantAt(t, a, `"fd00:96::10"`, "services", 0, "servicePorts", 1, "clusterIP")
	wantAt(t, a, `[]`, "services", 0, "servicePorts", 1, "externalIPs")
}

func TestPoliciesAndWeightsAreShown(t *testing.T) {
	_, h := webProxy(t, func(c *proxier.Config, _ *proxier.Deps) {
		c.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.Balancing = changetracker.SourceHash }
		c.Tracker.DecorateEndpoint = func(e *changetracker.Endpoint, _ *discovery.Endpoint, _ *discovery.EndpointSlice) { e.Weight = 7 }
	})
	wantAt(t, get(t, h, "/services", http.StatusOK), `"source-hash"`, "services", 0, "servicePorts", 0, "loadBalancing")
	a := get(t, h, "/explain?protocol=tcp&source=203.0.113.7&destination=198.51.100.10:80&origin=outside&interface=eth0", http.StatusOK)
	wantAt(t, a, `"source-hash"`, "loadBalancing")
	wantAt(t, a, `7`, "endpoints", 0, "weight")
}

func TestAServicePortWithoutClusterIP(t *testing.T) {
	_, h := webProxy(t, func(c *proxier.Config, _ *proxier.Deps) {
		c.Tracker.DecorateService = func(p *changetracker.ServicePort, _ *v1.Service) { p.ClusterIP, p.NodePort = netip.Addr{}, 30080 }
	})
	a := get(t, h, "/services", http.StatusOK)
	for i, family := range []string{"IPv4", "IPv6"} {
		wantAt(t, a, strconv.Quote(family), "services", 0, "servicePorts", i, "family")
		if port, ok := at(t, a, "services", 0, "servicePorts", i).(map[string]any); !ok || port["clusterIP"] != nil {
			t.Errorf("%v has a clusterIP, want none", port)
		}
	}
	wantAt(t, get(t, h, "/services?q=invalid", http.StatusOK), "0", "total")
}

func TestServicesComeInPages(t *testing.T) {
	p := newProxy(t)
	for i := range 1234 {
		p.OnServiceAdd(numberedService((i * 7) % 1234))
	}
	p.run(t)
	p.sync(t)
	h := debughttp.Handler(p)
	for query, want := range map[string]struct{ first, last, count int }{
		"":                      {0, 99, 100},
		"?limit=1000":           {0, 999, 1000},
		"?limit=1&offset=5":     {5, 5, 1},
		"?limit=100&offset=700": {700, 799, 100},
		"?offset=1200":          {1200, 1233, 34},
		"?offset=1234":          {count: 0},
		"?offset=2147483647":    {count: 0},
	} {
		a := get(t, h, "/services"+query, http.StatusOK)
		wantAt(t, a, `1234`, "total")
		names := servicesOf(t, a)
		if len(names) != want.count || !slices.IsSorted(names) {
			t.Errorf("services%s are %d, want %d, sorted: %v", query, len(names), want.count, names)
			continue
		}
		if want.count > 0 && (names[0] != fmt.Sprintf("load/service-%05d", want.first) || names[want.count-1] != fmt.Sprintf("load/service-%05d", want.last)) {
			t.Errorf("services%s are from %s to %s, want %v", query, names[0], names[len(names)-1], want)
		}
	}
}

func TestServiceInFull(t *testing.T) {
	p, h := webProxy(t)
	p.OnEndpointSliceUpdate(nil, webSlice(proxiertest.Terminating()))
	p.sync(t)
	a := get(t, h, "/service?namespace=shop&name=web", http.StatusOK)
	wantAt(t, a, `"IPv4"`, "servicePorts", 0, "family")
	wantAt(t, a, `"IPv6"`, "servicePorts", 1, "family")
	frontends, _ := at(t, a, "servicePorts", 0, "frontends").([]any)
	if len(frontends) != 4 {
		t.Fatalf("there are %d frontends, want 4: %v", len(frontends), frontends)
	}
	wantAt(t, a, `{"action":"forward","kind":"NodePort","masquerade":"keep","port":30080,"restricted":false,"scope":"Local",`+
		`"shortCircuit":true,"sourceRanges":[],"text":"node port 30080/TCP"}`, "servicePorts", 0, "frontends", 0)
	wantAt(t, a, `{"action":"forward","kind":"LoadBalancer","masquerade":"keep","port":80,"restricted":true,"scope":"Local",`+
		`"shortCircuit":true,"sourceRanges":["203.0.113.0/24"],"text":"198.51.100.10:80/TCP","vip":"198.51.100.10"}`, "servicePorts", 0, "frontends", 2)
	wantAt(t, a, `"non-pod"`, "servicePorts", 0, "frontends", 1, "masquerade")
	wantAt(t, a, `{"address":"10.244.1.5:8080","local":true,"node":"node-1","nodeHints":[],"ready":false,"serving":true,`+
		`"state":"terminating","terminating":true,"used":true,"zone":"zone-a","zoneHints":[]}`, "servicePorts", 0, "endpoints", 0)
	wantAt(t, a, `"ready"`, "servicePorts", 0, "endpoints", 1, "state")
	wantAt(t, a, `true`, "servicePorts", 0, "endpoints", 1, "used")
	wantAt(t, a, `"not ready"`, "servicePorts", 0, "endpoints", 2, "state")
	wantAt(t, a, `false`, "servicePorts", 0, "endpoints", 2, "used")
	wantAt(t, a, `"not ready"`, "servicePorts", 0, "endpoints", 2, "excluded")
}

func TestServiceTellsWhyItFailed(t *testing.T) {
	p := newProxy(t)
	name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP}
	p.OnServiceAdd(webService())
	p.run(t)
	p.sync(t)
	p.engines[v1.IPv6Protocol].Refuse(name, errors.New("no room"))
	p.OnEndpointSliceAdd(webSlice6())
	p.sync(t)
	a := get(t, debughttp.Handler(p), "/service?namespace=shop&name=web", http.StatusOK)
	wantAt(t, a, `null`, "servicePorts", 0, "error")
	wantAt(t, a, `"no room"`, "servicePorts", 1, "error")
}

// An endpoint of only the Local scope, or only the Cluster scope, is used too. The reason
// for an exclusion is that of the wider scope.
func TestEndpointUseFollowsTheScopes(t *testing.T) {
	p := newProxy(t)
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"),
		proxiertest.Port("http", v1.ProtocolTCP, 80), proxiertest.InternalPolicyLocal()))
	gone := func(e *discovery.Endpoint) {
		no, yes := false, true
		e.Conditions = discovery.EndpointConditions{Ready: &no, Serving: &no, Terminating: &yes}
	}
	p.OnEndpointSliceAdd(proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
		proxiertest.Endpoint("10.244.1.5", proxiertest.OnNode("node-1")),
		proxiertest.Endpoint("10.244.2.5", proxiertest.OnNode("node-2")),
		proxiertest.Endpoint("10.244.2.6", proxiertest.OnNode("node-2"), gone)))
	p.run(t)
	p.sync(t)
	a := get(t, debughttp.Handler(p), "/service?namespace=shop&name=web", http.StatusOK)
	wantAt(t, a, `true`, "servicePorts", 0, "endpoints", 0, "used")
	wantAt(t, a, `null`, "servicePorts", 0, "endpoints", 0, "excluded")
	wantAt(t, a, `"on another node"`, "servicePorts", 0, "endpoints", 1, "excluded")
	wantAt(t, a, `"gone"`, "servicePorts", 0, "endpoints", 2, "state")
	wantAt(t, a, `"Local"`, "servicePorts", 0, "internalTrafficPolicy")
	wantAt(t, a, `null`, "servicePorts", 0, "externalTrafficPolicy")
}

func TestSyncsAreTheHistory(t *testing.T) {
	p, h := webProxy(t)
	p.engines[v1.IPv4Protocol].Fail(errors.New("the kernel is <i>busy</i>"))
	p.OnEndpointSliceUpdate(nil, webSlice(proxiertest.Terminating()))
	if err := p.Sync(t.Context()); err == nil {
		t.Fatal("Sync = nil, want the failure")
	}
	syncs, _ := at(t, get(t, h, "/syncs", http.StatusOK), "syncs").([]any)
	history := p.History() // which may have grown by a retry
	if len(syncs) > len(history) || len(syncs) < 4 {
		t.Fatalf("there are %d syncs, want %d, at least 4", len(syncs), len(history))
	}
	full, failed := false, false
	for i, s := range syncs {
		want := history[i]
		wantAt(t, s, fmt.Sprintf("%q", want.Started.UTC().Format(time.RFC3339Nano)), "started")
		wantAt(t, s, fmt.Sprintf("%q", want.Family), "family")
		wantAt(t, s, fmt.Sprint(want.Full), "full")
		stages, _ := at(t, s, "stages").([]any)
		if len(stages) != len(want.Stages) || len(stages) == 0 {
			t.Errorf("sync %d has stages %v, want %v", i, stages, want.Stages)
		}
		full = full || want.Full
		if text, _ := at(t, s, "error").(string); strings.Contains(text, "<i>busy</i>") {
			failed = true
		}
	}
	if !full || !failed {
		t.Errorf("full: %v, failed: %v, want both among the syncs", full, failed)
	}
}

func TestSyncTimesAreSeconds(t *testing.T) {
	started := time.Date(2026, 3, 4, 5, 6, 7, 89, time.FixedZone("", 3600))
	source := &fakeSource{history: []proxier.SyncReport{{
		Family: v1.IPv6Protocol, Queued: started.Add(-2 * time.Second), Started: started, Duration: 1500 * time.Millisecond,
		Repair: true, Changes: 3, ServicePorts: 4, Failed: 1, FlowsDeleted: 5, Err: errors.New("broken"),
		Stages: []proxier.Stage{{Name: proxier.StageApply, Started: started.Add(250 * time.Millisecond), Duration: time.Second}},
		Apply:  proxier.ApplyReport{Writes: 6, Transactions: 2, Bytes: 7, Kernel: 20 * time.Millisecond},
	}}}
	a := get(t, debughttp.Handler(source), "/syncs", http.StatusOK)
	wantAt(t, a, `{"bytes":7,"changes":3,"durationSeconds":1.5,"error":"broken","failed":1,"family":"IPv6","flowsDeleted":5,`+
		`"full":false,"kernelSeconds":0.02,"queuedSeconds":2,"repair":true,"servicePorts":4,`+
		`"stages":[{"afterSeconds":0.25,"durationSeconds":1,"name":"apply"}],"started":"2026-03-04T04:06:07.000000089Z",`+
		`"transactions":2,"writes":6}`, "syncs", 0)
}

func TestExplainAnswersInJSON(t *testing.T) {
	_, h := webProxy(t)
	a := get(t, h, "/explain?protocol=tcp&source=203.0.113.7&destination=198.51.100.10:80&origin=outside&interface=eth0", http.StatusOK)
	wantAt(t, a, `"forward"`, "verdict")
	wantAt(t, a, `{"destination":"198.51.100.10:80","interface":"eth0","origin":"outside","protocol":"TCP","source":"203.0.113.7"}`, "packet")
	wantAt(t, a, `{"name":"web","namespace":"shop","portName":"http","protocol":"TCP"}`, "servicePort")
	wantAt(t, a, `"198.51.100.10:80/TCP"`, "frontend", "text")
	wantAt(t, a, `"Local"`, "scope")
	wantAt(t, a, `3600`, "affinitySeconds")
	wantAt(t, a, `null`, "endpoints", 0, "excluded")
	wantAt(t, a, `"on another node"`, "endpoints", 1, "excluded")
	reasons, _ := at(t, a, "reasons").([]any)
	if len(reasons) < 3 {
		t.Errorf("reasons are %v, want at least three", reasons)
	}

	a = get(t, h, "/explain?protocol=UDP&source=203.0.113.7&destination=203.0.113.1:9&origin=outside", http.StatusOK)
	wantAt(t, a, `"pass"`, "verdict")
	wantAt(t, a, `null`, "servicePort")
	wantAt(t, a, `null`, "scope")
	wantAt(t, a, `[]`, "endpoints")
}

// bySocket explains like an engine whose sockets translate everything.
type bySocket struct{ debughttp.Proxy }

func (b bySocket) Explain(ctx context.Context, p desired.Packet) (desired.Explanation, error) {
	e, err := b.Proxy.Explain(ctx, p)
	e.BySocket = true
	return e, err
}

func TestExplainSaysWhetherASocketDoesIt(t *testing.T) {
	p, h := webProxy(t)
	const target = "/explain?protocol=tcp&source=203.0.113.7&destination=198.51.100.10:80&origin=outside"
	wantAt(t, get(t, h, target, http.StatusOK), `null`, "bySocket")
	wantAt(t, get(t, debughttp.Handler(bySocket{p}), target, http.StatusOK), `true`, "bySocket")
}

func TestWrongParametersAreNamed(t *testing.T) {
	_, h := webProxy(t)
	long := strings.Repeat("x", 257)
	for target, parameter := range map[string]string{
		"/status?limit=0":                   "limit",
		"/services?limit=1001":              "limit",
		"/services?limit=-1":                "limit",
		"/services?limit=1e2":               "limit",
		"/services?offset=-1":               "offset",
		"/services?offset=99999999999":      "offset",
		"/services?q=" + long:               "q",
		"/services?q=%zz":                   "query",
		"/service?name=web":                 "namespace",
		"/service?namespace=shop":           "name",
		"/service?namespace=shop&name=":     "name",
		"/service?namespace=x&name=" + long: "name",
		"/service?namespace=" + long:        "namespace",
		"/explain?source=192.0.2.1&destination=192.0.2.2:1&origin=pod":                                       "protocol",
		"/explain?protocol=ICMP&source=192.0.2.1&destination=192.0.2.2:1&origin=pod":                         "protocol",
		"/explain?protocol=TCP&source=192.0.2&destination=192.0.2.2:1&origin=pod":                            "source",
		"/explain?protocol=TCP&source=2001:db8::1&destination=192.0.2.2:1&origin=pod":                        "source",
		"/explain?protocol=TCP&source=192.0.2.1&destination=192.0.2.2&origin=pod":                            "destination",
		"/explain?protocol=TCP&source=192.0.2.1&destination=192.0.2.2:0&origin=pod":                          "destination",
		"/explain?protocol=TCP&source=192.0.2.1&destination=192.0.2.2:1&origin=moon":                         "origin",
		"/explain?protocol=TCP&source=192.0.2.1&destination=192.0.2.2:1":                                     "origin",
		"/explain?protocol=TCP&source=192.0.2.1&destination=192.0.2.2:1&origin=pod&interface=" + long + "ab": "interface",
	} {
		text, _ := at(t, get(t, h, target, http.StatusBadRequest), "error").(string)
		if !slices.Contains(strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == ':' }), parameter) {
			t.Errorf("GET %s: error is %q, want it to name %s", target, text, parameter)
		}
	}
}

func TestErrorsHaveTheirStatus(t *testing.T) {
	idle := debughttp.Handler(newProxy(t))
	packet := "/explain?protocol=TCP&source=192.0.2.1&destination=192.0.2.10:1&origin=outside"
	get(t, idle, packet, http.StatusServiceUnavailable)
	get(t, idle, "/service?namespace=shop&name=web", http.StatusNotFound)
	wantAt(t, get(t, idle, "/services", http.StatusOK), `[]`, "services")
	wantAt(t, get(t, idle, "/syncs", http.StatusOK), `[]`, "syncs")

	_, h := webProxy(t, func(_ *proxier.Config, deps *proxier.Deps) {
		deps.LocalAddresses = func(context.Context) ([]netip.Addr, error) { return nil, errors.New("first\nsecond") }
	})
	a := get(t, h, packet, http.StatusInternalServerError)
	if text, _ := at(t, a, "error").(string); !strings.HasSuffix(text, "first; second") {
		t.Errorf("error is %q, want one line with the cause", text)
	}
	get(t, h, "/nothing", http.StatusNotFound)
	get(t, h, "/status/", http.StatusNotFound)
	get(t, h, "/../handler.go", http.StatusNotFound)
}

func TestOnlyReadingIsAnswered(t *testing.T) {
	_, h := webProxy(t)
	for _, target := range []string{"/", "/status", "/services", "/service", "/syncs", "/explain", "/verify", "/page.css"} {
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions, http.MethodPatch} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, request(method, target))
			if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "GET, HEAD" {
				t.Errorf("%s %s = %d, Allow %q, want 405", method, target, w.Code, w.Header().Get("Allow"))
			}
		}
	}
}

// The server is real, so that responses to HEAD have no body.
func TestPageIsWholeWhereverItIsMounted(t *testing.T) {
	_, h := webProxy(t)
	mux := http.NewServeMux()
	mux.Handle("/debug/serviceplane/", http.StripPrefix("/debug/serviceplane/", h))
	mux.Handle("/with/slash/", http.StripPrefix("/with/slash", h))
	mux.Handle("/bare", http.StripPrefix("/bare", h))
	mux.Handle("/bare/", http.StripPrefix("/bare", h))
	mux.Handle("/", h)
	server := httptest.NewServer(mux)
	defer server.Close()
	defer server.Client().CloseIdleConnections()
	for _, mount := range []string{"/debug/serviceplane/", "/debug/serviceplane", "/with/slash/", "/bare", "/bare/", "/"} {
		html, base := fetch(t, server, http.MethodGet, server.URL+mount, "text/html; charset=utf-8")
		if !strings.HasSuffix(base.Path, "/") {
			t.Errorf("the page of %s is at %s, which its URLs are not relative to", mount, base)
		}
		references := 0
		for _, part := range strings.FieldsFunc(html, func(r rune) bool { return r == ' ' || r == '>' }) {
			_, reference, found := strings.Cut(part, `="`)
			if reference = strings.TrimSuffix(reference, `"`); !found || !strings.HasPrefix(part, "src=") && !strings.HasPrefix(part, "href=") {
				continue
			}
			references++
			kind := map[string]string{"css": "text/css; charset=utf-8", "svg": "image/svg+xml", ".js": "text/javascript; charset=utf-8", "ort": "application/json"}
			fetch(t, server, http.MethodGet, base.JoinPath(reference).String(), kind[reference[len(reference)-3:]])
		}
		if references != 4 {
			t.Errorf("the page has %d references, want 4", references)
		}
		fetch(t, server, http.MethodGet, base.JoinPath("syncs").String(), "application/json")
		if body, _ := fetch(t, server, http.MethodHead, base.JoinPath("services").String(), "application/json"); body != "" {
			t.Errorf("HEAD services has a body: %q", body)
		}
	}
}

// The page has no inline code or style, which the policy would have to allow.
func TestPageAllowsNothingFromElsewhere(t *testing.T) {
	w := httptest.NewRecorder()
	debughttp.Handler(&fakeSource{}).ServeHTTP(w, request(http.MethodGet, "/"))
	policy := w.Header().Get("Content-Security-Policy")
	for _, want := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"} {
		if !slices.Contains(strings.Split(policy, "; "), want) {
			t.Errorf("the policy is %q, want %q in it", policy, want)
		}
	}
	if strings.Contains(policy, "unsafe") || strings.Contains(policy, "*") {
		t.Errorf("the policy is %q, want it strict", policy)
	}
	for _, unwanted := range []string{"://", "onclick", "style=", "<style", "javascript:"} {
		if strings.Contains(w.Body.String(), unwanted) {
			t.Errorf("the page contains %q", unwanted)
		}
	}
}

// fetch follows redirects and returns the body and its URL.
func fetch(t *testing.T, server *httptest.Server, method, target, wantType string) (body string, at *url.URL) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, target, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := server.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if got := response.Header.Get("Content-Type"); response.StatusCode != http.StatusOK || got != wantType {
		t.Fatalf("%s %s = %d %q, want 200 %q", method, target, response.StatusCode, got, wantType)
	}
	return string(content), response.Request.URL
}

// fakeSource is a Source with fixed results.
type fakeSource struct {
	debughttp.Proxy

	status  proxier.Status
	history []proxier.SyncReport
}

func (s *fakeSource) Status() proxier.Status        { return s.status }
func (s *fakeSource) History() []proxier.SyncReport { return s.history }
