package healthcheck

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

// hasIPv6 reports whether the loopback interface has ::1, and logs if not.
func hasIPv6(t *testing.T) bool {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp6", "[::1]:0")
	if err != nil {
		t.Logf("NOTHING IS TESTED ABOUT IPv6: %v", err)
		return false
	}
	return l.Close() == nil
}

// onSockets runs NodePorts on real sockets.
func onSockets(t *testing.T, options NodePortOptions) *nodePortServer {
	t.Helper()
	n := newNodePortServer(options)
	background(t, func(ctx context.Context) error { return n.Run(ctx, healthyStatus) })
	return n
}

// TestAnAnswerOnTheWire: HC-07 to HC-10 and HC-14, to the byte, on one wildcard
// listener.
func TestAnAnswerOnTheWire(t *testing.T) {
	port := freePort(t)
	n := onSockets(t, NodePortOptions{})
	n.Update("IPv4", full("IPv4", services{web: {Port: port, LocalEndpoints: 12}}))
	n.Update("IPv6", full("IPv6", services{web: {Port: port}}))
	poll.Until(t, "one listener for both families", func() bool { return networks(n) == "tcp " && answers(t, port) })
	hosts := map[string]int{"127.0.0.1": 12}
	if hasIPv6(t) {
		hosts["::1"] = 0
	}
	for host, count := range hosts {
		for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodDelete} {
			for _, path := range []string{"/", "/healthz", "/any/thing?else"} {
				expectAnswer(t, method, "http://"+net.JoinHostPort(host, fmt.Sprint(port))+path, count)
			}
		}
	}
}

// networks returns the networks of all listeners, each followed by a blank.
func networks(n *nodePortServer) (all string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for key := range n.listeners {
		all += key.network + " "
	}
	return all
}

func answers(t *testing.T, port uint16) bool {
	t.Helper()
	code, _ := ask(t, client(t), fmt.Sprintf("http://127.0.0.1:%d", port))
	return code != 0
}

func expectAnswer(t *testing.T, method, url string, count int) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := client(t).Do(request)
	if err != nil {
		t.Error(err)
		return
	}
	defer answer.Body.Close()
	want := fmt.Sprintf("{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n"+
		"\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": true\n}", count)
	if got, err := io.ReadAll(answer.Body); err != nil || string(got) != want {
		t.Errorf("%s %s: body %q, error %v, want %q", method, url, got, err, want)
	}
	code := http.StatusOK
	if count == 0 {
		code = http.StatusServiceUnavailable
	}
	if answer.StatusCode != code {
		t.Errorf("%s %s: code %d, want %d", method, url, answer.StatusCode, code)
	}
	for header, want := range map[string]string{
		"Content-Type": "application/json", "X-Content-Type-Options": "nosniff", "X-Load-Balancing-Endpoint-Weight": fmt.Sprint(count),
	} {
		if got := answer.Header.Get(header); got != want {
			t.Errorf("%s %s: header %s = %q, want %q", method, url, header, got, want)
		}
	}
}

// HC-04, HC-06: one listener per address, one of which is in use at first.
func TestOneListenerPerAddress(t *testing.T) {
	port := freePort(t)
	busy, err := new(net.ListenConfig).Listen(t.Context(), "tcp4", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	loopback := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")}
	n := onSockets(t, NodePortOptions{Addresses: func(context.Context) ([]netip.Addr, error) { return loopback, nil }})
	n.Update("IPv4", within(services{web: {Port: port, LocalEndpoints: 1}}, "127.0.0.0/8"))
	if hasIPv6(t) {
		n.Update("IPv6", within(services{web: {Port: port, LocalEndpoints: 2}}, "::1/128"))
		poll.Until(t, "the other address answers", func() bool {
			code, _ := ask(t, client(t), fmt.Sprintf("http://[::1]:%d", port))
			return code == http.StatusOK
		})
	}
	poll.Until(t, "the busy address is a condition", func() bool { return len(n.Conditions()) == 1 })
	busy.Close()
	poll.Until(t, "the address is free and answers", func() bool {
		code, _ := ask(t, client(t), fmt.Sprintf("http://127.0.0.1:%d", port))
		return code == http.StatusOK
	})
	if got := n.Conditions(); len(got) != 0 {
		t.Errorf("conditions %v, want none", got)
	}
}

// W-19: a connection that outlives its listener does not get 200.
func TestAKeptConnectionToAGoneService(t *testing.T) {
	port := freePort(t)
	n := onSockets(t, NodePortOptions{})
	n.Update("IPv4", full("IPv4", services{web: {Port: port, LocalEndpoints: 1}}))
	keeping := client(t)
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	poll.Until(t, "200", func() bool {
		code, _ := ask(t, keeping, url)
		return code == http.StatusOK
	})
	n.Update("IPv4", full("IPv4", nil))
	if code, body := ask(t, keeping, url); code == http.StatusOK {
		t.Errorf("answer %d %s for a deleted Service, want another code", code, body)
	}
}

// W-19: a client connects before the Service is deleted, and sends its request afterwards.
func TestALateRequestForAGoneService(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001, LocalEndpoints: 1}}))
		synctest.Wait()
		conn, err := b.dial("tcp4 0.0.0.0:30001", "10.0.0.1:30001")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		synctest.Wait()
		b.Update("IPv4", full("IPv4", nil))
		b.expectOpen(t, "deleted")
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return // net/http has disconnected
		}
		defer answer.Body.Close()
		if got := answer.StatusCode; got != http.StatusServiceUnavailable {
			t.Errorf("code %d, want 503", got)
		}
	})
}

// W-19, W-20: a request reaches the handler before its Service is deleted, and there is no
// status function.
func TestTheHandlerOfAGoneServiceAnswers503(t *testing.T) {
	n := newNodePortServer(NodePortOptions{})
	handler := (&answerer{localEndpoints: n.localEndpoints}).handler(web)
	code := func() int {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		return w.Code
	}
	n.Update("IPv6", full("IPv6", services{web: {Port: 30001, LocalEndpoints: 1}}))
	if got := code(); got != http.StatusOK {
		t.Errorf("code %d, want 200", got)
	}
	n.Update("IPv6", partial("IPv6", services{web: {}}))
	if got := code(); got != http.StatusServiceUnavailable {
		t.Errorf("code %d after the Service was deleted, want 503", got)
	}
}

func TestASlowClientDoesNotHoldNodePorts(t *testing.T) {
	port := freePort(t)
	n := newNodePortServer(NodePortOptions{})
	stop := background(t, func(ctx context.Context) error { return n.Run(ctx, healthyStatus) })
	n.Update("IPv4", full("IPv4", services{web: {Port: port, LocalEndpoints: 1}}))
	poll.Until(t, "it answers", func() bool { return answers(t, port) })
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nX-Slow: "); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	stop()
	if took := time.Since(began); took > headerTimeout-time.Second {
		t.Errorf("Run returned after %v, want about %v", took, drainTimeout)
	}
}

// For the race detector: Updates of both families, probes and Conditions at once.
func TestUpdatesAndProbesAtOnce(t *testing.T) {
	ports := []uint16{freePort(t), freePort(t), freePort(t)}
	loopback := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	n := newNodePortServer(NodePortOptions{Addresses: func(context.Context) ([]netip.Addr, error) { return loopback, nil }})
	background(t, func(ctx context.Context) error {
		return n.Run(ctx, func() proxier.Status {
			s := healthyStatus()
			s.Conditions = n.Conditions() // as Proxier.Status does
			return s
		})
	})
	ctx, stop := context.WithCancel(t.Context())
	var updating, probing sync.WaitGroup
	probe := func(port uint16) { ask(t, client(t), fmt.Sprintf("http://127.0.0.1:%d", port)) }
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		updating.Go(func() {
			for i := range 300 {
				u := full(family, services{web: {Port: ports[i/50%3], LocalEndpoints: i % 3}, dns: {Port: ports[(i/50+1)%3]}})
				u.Full = i%2 == 0
				if i/100%2 == 0 && family == v1.IPv4Protocol {
					u.NodePortAddresses = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
				}
				n.Update(family, u)
				probe(ports[i%3])
			}
		})
	}
	for _, port := range ports {
		probing.Go(func() {
			for ctx.Err() == nil {
				probe(port)
				n.Conditions()
			}
		})
	}
	updating.Wait()
	stop()
	probing.Wait()
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		n.Update(family, full(family, services{web: {Port: ports[0], LocalEndpoints: 1}}))
	}
	poll.Until(t, "the last update holds", func() bool {
		code, _ := ask(t, client(t), fmt.Sprintf("http://127.0.0.1:%d", ports[0]))
		return code == http.StatusOK && len(n.Conditions()) == 0
	})
}

// expected is an independent model of where to listen: the ports of each family, and
// the order in which they arrived.
type expected struct {
	ports  map[v1.IPFamily]map[types.NamespacedName]uint16
	latest map[types.NamespacedName][]v1.IPFamily // in order of arrival
	ranges map[v1.IPFamily][]netip.Prefix
}

func (e *expected) update(family v1.IPFamily, u proxier.HealthUpdate) {
	if e.ports[family] == nil {
		e.ports[family] = map[types.NamespacedName]uint16{}
	}
	e.ranges[family] = u.NodePortAddresses
	if u.Full {
		for name := range e.ports[family] {
			if u.Ports[name] == 0 {
				delete(e.ports[family], name)
			}
		}
	}
	for name, port := range u.Ports {
		if port == 0 {
			delete(e.ports[family], name)
			continue
		}
		if e.ports[family][name] != port {
			e.latest[name] = append(e.latest[name], family)
		}
		e.ports[family][name] = port
	}
}

func (e *expected) open(local []netip.Addr) []string {
	var keys []string
	wild := func(f v1.IPFamily) bool { return len(e.ranges[f]) > 0 && e.ranges[f][0].Bits() == 0 }
	for name, arrived := range e.latest {
		port := uint16(0)
		for _, family := range arrived {
			if p := e.ports[family][name]; p != 0 {
				port = p
			}
		}
		if port == 0 {
			continue
		}
		if wild(v1.IPv4Protocol) && wild(v1.IPv6Protocol) {
			keys = append(keys, fmt.Sprintf("tcp :%d", port))
			continue
		}
		for family, network := range map[v1.IPFamily]string{v1.IPv4Protocol: "tcp4", v1.IPv6Protocol: "tcp6"} {
			if wild(family) {
				all := map[v1.IPFamily]string{v1.IPv4Protocol: "0.0.0.0", v1.IPv6Protocol: "[::]"}
				keys = append(keys, fmt.Sprintf("%s %s:%d", network, all[family], port))
				continue
			}
			for _, a := range local {
				if slices.ContainsFunc(e.ranges[family], func(r netip.Prefix) bool { return r.Contains(a) }) {
					keys = append(keys, fmt.Sprintf("%s %s", network, netip.AddrPortFrom(a, port)))
				}
			}
		}
	}
	slices.Sort(keys)
	return keys
}

// FuzzHistories: after any sequence of updates, the listeners are those of the last ones
// (HC-01 to HC-04), and no others.
func FuzzHistories(f *testing.F) {
	for seed := range uint64(40) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 1))
		inBubble(t, func(t *testing.T, b *bubble) {
			b.setAddresses("10.0.0.1", "10.0.0.2", "192.0.2.1", "fd00::1", "2001:db8::1")
			model := expected{map[v1.IPFamily]map[types.NamespacedName]uint16{}, map[types.NamespacedName][]v1.IPFamily{}, map[v1.IPFamily][]netip.Prefix{}}
			for step := range 60 {
				family, u := randomUpdate(random)
				model.update(family, u)
				b.Update(family, u)
				if random.IntN(3) > 0 {
					continue // the next one comes at once
				}
				time.Sleep(longestRetry + stableAfter) // for listeners that wait for each other's ports
				synctest.Wait()
				if got, want := b.open(), model.open(*b.addresses.Load()); !slices.Equal(got, want) {
					t.Fatalf("step %d: listens on %q, want %q", step, got, want)
				}
			}
		})
	})
}

func randomUpdate(random *rand.Rand) (v1.IPFamily, proxier.HealthUpdate) {
	family := []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}[random.IntN(2)]
	u := services{}.update(random.IntN(4) == 0, everywhere[family])
	if random.IntN(3) == 0 {
		u.NodePortAddresses = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}[:random.IntN(3)]
	}
	for i := range 4 {
		if random.IntN(2) == 0 {
			continue
		}
		// Each Service has its own ports, as the API server ensures.
		port := uint16(30000 + 10*i + random.IntN(3))
		if port%10 == 2 {
			port = 0
		}
		name := types.NamespacedName{Namespace: "default", Name: fmt.Sprint("service-", i)}
		u.Ports[name], u.LocalEndpoints[name] = port, random.IntN(3)
	}
	return family, u
}
