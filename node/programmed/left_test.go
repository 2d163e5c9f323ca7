package programmed_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxier"
)

// sending is a Source that sends to some endpoints, whatever is asked for.
type sending struct {
	provider

	to    []proxier.Sending
	takes time.Duration
	asked [][]netip.AddrPort
}

func (s *sending) Sends(endpoints ...netip.AddrPort) []proxier.Sending {
	s.asked = append(s.asked, endpoints)
	time.Sleep(s.takes)
	return s.to
}

func endpointAt(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

func sendingTo(texts ...string) (all []proxier.Sending) {
	for _, text := range texts {
		all = append(all, proxier.Sending{Endpoint: endpointAt(text), Service: portOf(web), Frontends: []desired.Key{{VIP: netip.MustParseAddr("10.96.0.1"), Port: 80, Protocol: desired.TCP}}})
	}
	return all
}

// has20 is a node that has version 20 in both families.
func has20(to ...proxier.Sending) *sending {
	f := proxier.FamilyStatus{Synced: true, Versions: changetracker.Versions{EndpointSlices: "20"}}
	return &sending{provider: provider{proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: f, v1.IPv6Protocol: f}}}, to: to}
}

// What is missing of a Change with endpoints that have left. Each entry is a Report, as a node makes it or changed.
func TestEndpointsThatHaveLeft(t *testing.T) {
	pod := endpointAt("10.244.0.1:8080")
	flows := sendingTo("10.244.0.1:8080")
	flows[0].FlowsOnly = true
	failing := sendingTo("10.244.0.1:8080")
	failing[0].Reason = "not programmed, the kernel has an older version: no room"
	lingering := []proxier.Sending{{Endpoint: endpointAt("10.244.0.1:0"), Reason: "connected UDP sockets may still send to it"}}
	for name, test := range map[string]struct {
		sends   []proxier.Sending
		asked   []netip.AddrPort
		edit    func(*programmed.NodeReport)
		version string
		left    netip.AddrPort
		want    string
	}{
		"nothing":                    {asked: []netip.AddrPort{pod}, left: pod},
		"it sends":                   {sends: sendingTo("10.244.0.1:8080"), asked: []netip.AddrPort{pod}, left: pod, want: `IPv4: it still sends to 10.244.0.1:8080: port "http" (TCP) of Service shop/web at 10.96.0.1:80/TCP`},
		"to a pod of another port":   {sends: sendingTo("10.244.0.1:8081"), asked: []netip.AddrPort{pod}, left: pod},
		"any port":                   {sends: sendingTo("10.244.0.1:8081"), left: endpointAt("10.244.0.1:0"), want: "still sends to 10.244.0.1:8081"},
		"to another pod":             {sends: sendingTo("10.244.0.2:8080"), left: pod},
		"in the other family":        {sends: sendingTo("[fd00::1]:8080"), left: endpointAt("[fd00::1]:8080"), want: "IPv6: it still sends to [fd00::1]:8080"},
		"flows only":                 {sends: flows, asked: []netip.AddrPort{pod}, left: pod},
		"it fails":                   {sends: failing, left: pod, want: "(not programmed, the kernel has an older version: no room)"},
		"sockets":                    {sends: lingering, left: pod, want: "it still sends to 10.244.0.1:0: (connected UDP sockets may still send to it)"},
		"mapped":                     {sends: sendingTo("10.244.0.1:8080"), left: endpointAt("[::ffff:10.244.0.1]:8080"), want: "still sends to 10.244.0.1:8080"},
		"it is behind":               {left: pod, version: "21", want: "EndpointSlices are those of version 20, want 21"},
		"it cannot say":              {left: pod, edit: func(r *programmed.NodeReport) { r.Families[v1.IPv4Protocol] = programmed.Family{EndpointSlices: "20"} }, want: "it does not say to which endpoints it sends"},
		"it has too many to list":    {sends: sendingTo("10.244.0.3:8080", "10.244.0.4:8080"), left: pod, edit: func(r *programmed.NodeReport) { r.Limit(1, 10) }, want: "it sends to 1 endpoints that are not ready and not in the report"},
		"those asked for come first": {sends: sendingTo("10.243.0.3:8080", "10.244.0.1:8080"), asked: []netip.AddrPort{pod}, left: pod, edit: func(r *programmed.NodeReport) { r.Limit(1, 10) }, want: "still sends to 10.244.0.1:8080"},
		"others that are asked for":  {sends: sendingTo("10.244.0.3:8080"), asked: []netip.AddrPort{pod, endpointAt("10.244.0.3:8080")}, left: pod, edit: func(r *programmed.NodeReport) { r.Limit(1, 10) }},
	} {
		report := programmed.NewReport("n", has20(test.sends...), began, test.asked...)
		if test.edit != nil {
			test.edit(&report)
		}
		text, err := json.Marshal(report)
		if err != nil {
			t.Fatal(err)
		}
		var read programmed.NodeReport
		if err := json.Unmarshal(text, &read); err != nil {
			t.Fatal(err)
		}
		err = read.Missing(programmed.ServiceChange{Service: web, Versions: changetracker.Versions{EndpointSlices: test.version}, Left: []netip.AddrPort{test.left}})
		if got := fmt.Sprint(err); test.want == "" && err != nil || !strings.Contains(got, test.want) {
			t.Errorf("%s: missing %q, want %q", name, got, test.want)
		}
	}
}

// A node must have what has joined as ready, at some frontend or not; who was not asked does not say it.
func TestEndpointsThatHaveJoined(t *testing.T) {
	pod, ready := endpointAt("10.244.0.1:8080"), sendingTo("10.244.0.1:8080")
	ready[0].Ready, ready[0].Frontends = true, nil // its policy leaves it to other nodes
	ejected := sendingTo("10.244.0.1:8080")
	other := sendingTo("10.244.0.1:8080")
	other[0].Ready, other[0].Service = true, portOf(types.NamespacedName{Namespace: "shop", Name: "other"})
	for name, test := range map[string]struct {
		sends []proxier.Sending
		asked []netip.AddrPort
		want  string
	}{
		"ready":          {sends: ready, asked: []netip.AddrPort{pod}},
		"unknown":        {asked: []netip.AddrPort{pod}, want: "IPv4: it does not have endpoint 10.244.0.1:8080 of Service shop/web as ready"},
		"not ready":      {sends: ejected, asked: []netip.AddrPort{pod}, want: "does not have endpoint"},
		"of another one": {sends: other, asked: []netip.AddrPort{pod}, want: "does not have endpoint"},
		"not asked":      {},
	} {
		report := programmed.NewReport("n", has20(test.sends...), began, test.asked...)
		c := programmed.ServiceChange{Service: web, Versions: changetracker.Versions{EndpointSlices: "20"}, Joined: []netip.AddrPort{pod}}
		if err := report.Missing(c); test.want == "" && err != nil || !strings.Contains(fmt.Sprint(err), test.want) {
			t.Errorf("%s: missing %v, want %q", name, err, test.want)
		}
		if c.Joined, c.Left = nil, c.Joined; name == "ready" && report.Missing(c) != nil {
			t.Errorf("%s: %v although no frontend sends to it", name, report.Missing(c))
		}
	}
}

// A Service that fails does not hold up a pod that its older version does not have.
func TestAFailureElsewhereHoldsNothingUp(t *testing.T) {
	node := has20()
	f := node.status.Families[v1.IPv4Protocol]
	f.Failed = []*proxier.ServiceError{{Name: portOf(web), Err: errors.New("no room")}}
	node.status.Families[v1.IPv4Protocol] = f
	c := programmed.ServiceChange{Service: web, Versions: changetracker.Versions{EndpointSlices: "20"}}
	report := programmed.NewReport("n", node, began)
	if report.Missing(c) == nil {
		t.Error("the change of a Service that fails is not missing")
	}
	if c.Left = []netip.AddrPort{endpointAt("10.244.0.1:8080")}; report.Missing(c) != nil {
		t.Errorf("missing %v, want nothing", report.Missing(c))
	}
}

// An answer names only what the query does, and is small whatever fails and whatever is sent to; what it leaves
// out is counted.
func TestAnAnswerHasWhatTheQueryNames(t *testing.T) {
	node := has20()
	f := node.status.Families[v1.IPv4Protocol]
	for i := range 10_000 {
		name := types.NamespacedName{Namespace: "secret", Name: fmt.Sprintf("secret-%d", i)}
		f.Failed = append(f.Failed, &proxier.ServiceError{Name: portOf(name), Err: errors.New(strings.Repeat("x", 1000))})
		node.to = append(node.to, proxier.Sending{Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 80), Service: portOf(name)})
	}
	f.Failed = append(f.Failed, &proxier.ServiceError{Name: portOf(web), Err: errors.New("no room")})
	node.status.Families[v1.IPv4Protocol] = f
	server := httptest.NewServer(programmed.Handler("n", node))
	t.Cleanup(server.Close)
	for query, want := range map[string]string{
		"":                 `"unlisted":10001`,
		"service=shop/web": "no room",
		"service=shop/web&endpoint=10.1.0.7&endpoint=10.1.0.9:80": `"endpoint":"10.1.0.9:80"`,
	} {
		answer, err := server.Client().Get(server.URL + "?" + query)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		secrets := strings.Count(string(text), "secret-") - strings.Count(query, "endpoint=")
		if err != nil || len(text) > 2000 || secrets > 0 || !strings.Contains(string(text), want) || !strings.Contains(string(text), `"unlistedSends":`) {
			t.Errorf("%q: %d bytes, %d names of others, %v: %s, want %q", query, len(text), secrets, err, text[:min(len(text), 500)], want)
		}
	}
	many := url.Values{}
	for i := range 33 {
		many.Add("endpoint", fmt.Sprintf("10.1.0.%d", i))
	}
	for query, want := range map[string]string{many.Encode(): "33 endpoints, want at most 32", "endpoint=x": "want ADDRESS or ADDRESS:PORT"} {
		answer, err := server.Client().Get(server.URL + "?" + query)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if answer.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), want) {
			t.Errorf("%s: status %d, %q; want 400 and %q", query, answer.StatusCode, text, want)
		}
	}
}

// Callers take a tenth of the time at most, however many they are; one that gives up leaves its turn.
func TestAnswersTakeATenthOfTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node := has20()
		node.takes = 20 * time.Millisecond
		handler := programmed.Handler("n", node)
		began := time.Now()
		var asking sync.WaitGroup
		for i := range 20 {
			asking.Go(func() {
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				if i == 7 {
					stop()
				}
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/programmed", http.NoBody))
			})
		}
		asking.Wait()
		took := time.Since(began)
		if n := len(node.asked); n < 19 || took < time.Duration(n-1)*10*node.takes {
			t.Errorf("%d answers of %v in %v, want a tenth of the time", n, node.takes, took)
		}
		time.Sleep(time.Second) // the last pause
	})
}

// The client asks for what the Change names.
func TestTheClientAsksForEndpoints(t *testing.T) {
	node := has20(sendingTo("10.244.0.1:8080")...)
	server := httptest.NewServer(programmed.Handler("n", node))
	t.Cleanup(server.Close)
	c := programmed.ServiceChange{Left: []netip.AddrPort{endpointAt("10.244.0.1:0"), endpointAt("[fd00::1]:8080")}}
	report, err := programmed.OverHTTP(server.Client(), func(string) string { return server.URL })(t.Context(), "n", c)
	if err != nil || fmt.Sprint(report.Asked) != "[10.244.0.1:0 [fd00::1]:8080]" || report.Missing(c) == nil {
		t.Errorf("report %+v, %v; want that both endpoints were asked for, and that the node sends to the first", report, err)
	}
	c.Left = make([]netip.AddrPort, 33)
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "at most 32") {
		t.Errorf("Validate = %v, want that there are too many endpoints", err)
	}
}
