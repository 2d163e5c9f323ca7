package canary

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
)

var (
	vip4   = netip.MustParseAddrPort("192.0.0.7:9")
	node1  = netip.MustParseAddr("192.0.2.1")
	node2  = netip.MustParseAddr("192.0.2.2")
	outage = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
)

// fake is a node without sockets, and the Provider that programs it.
type fake struct {
	proxier.Provider // nil: other methods are not called

	mu        sync.Mutex // guards all below
	synced    bool
	address   netip.Addr
	routeErr  error
	listeners map[netip.AddrPort]*fakeListener
	lastPort  uint16
	service   *v1.Service
	slice     *discovery.EndpointSlice
	events    []string
	dialErr   error            // what the rules do instead of leading to the endpoint
	other     func(c net.Conn) // who serves instead of the endpoint
	dials     []time.Time
}

func (f *fake) Status() proxier.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: {Synced: f.synced}}}
}

func (f *fake) event(what string, change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, what)
	change()
}

func (f *fake) OnServiceAdd(s *v1.Service) { f.event("service", func() { f.service = s }) }

func (f *fake) OnServiceDelete(*v1.Service) { f.event("no service", func() { f.service = nil }) }

func (f *fake) OnEndpointSliceAdd(s *discovery.EndpointSlice) {
	f.event("slice", func() { f.slice = s })
}

func (f *fake) OnEndpointSliceUpdate(_, s *discovery.EndpointSlice) {
	f.event("other slice", func() { f.slice = s })
}

func (f *fake) OnEndpointSliceDelete(*discovery.EndpointSlice) {
	f.event("no slice", func() { f.slice = nil })
}

func (f *fake) source(context.Context, netip.Addr) (netip.Addr, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.address, f.routeErr
}

func (f *fake) listen(_ context.Context, address netip.AddrPort) (net.Listener, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lastPort++
	l := &fakeListener{address: netip.AddrPortFrom(address.Addr(), 40000+f.lastPort), clients: make(chan net.Conn), closed: make(chan struct{})}
	f.listeners[l.address] = l
	return l, nil
}

// dial does what the rules would do.
func (f *fake) dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dials = append(f.dials, time.Now())
	client, server := net.Pipe()
	switch {
	case f.dialErr != nil:
		return nil, f.dialErr
	case f.other != nil:
		go f.other(server)
		return client, nil
	case f.service == nil || to.String() != net.JoinHostPort(f.service.Spec.ClusterIP, "9"):
		return nil, outage
	}
	e := netip.AddrPortFrom(netip.MustParseAddr(f.slice.Endpoints[0].Addresses[0]), uint16(*f.slice.Ports[0].Port))
	select {
	case f.listeners[e].clients <- server:
		return client, nil
	case <-f.listeners[e].closed:
		return nil, outage
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type fakeListener struct {
	address netip.AddrPort
	clients chan net.Conn
	closed  chan struct{}
}

func (l *fakeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.clients:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *fakeListener) Close() error {
	close(l.closed)
	return nil
}

func (l *fakeListener) Addr() net.Addr { return net.TCPAddrFromAddrPort(l.address) }

// kit is a canary on a fake node in a synctest bubble.
type kit struct {
	*fake
	canary *Canary
	logs   *observer.ObservedLogs
	stop   func()
}

func inBubble(t *testing.T, options Options, test func(t *testing.T, k *kit)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		options.Logger = zap.New(core)
		c, err := New(options)
		if err != nil {
			t.Fatal(err)
		}
		k := &kit{fake: &fake{synced: true, address: node1, listeners: map[netip.AddrPort]*fakeListener{}}, canary: c, logs: logs}
		c.network = k.fake
		k.stop = poll.Background(t, func(ctx context.Context) error { return c.Run(ctx, k) })
		test(t, k)
	})
}

func (k *kit) change(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
}

// after waits, and expects a state.
func (k *kit) after(t *testing.T, wait time.Duration, want TestState) TestStatus {
	t.Helper()
	time.Sleep(wait)
	synctest.Wait()
	got := k.canary.Status()[v1.IPv4Protocol]
	if got.State != want {
		t.Errorf("state %v, want %v: %+v", got.State, want, got)
	}
	return got
}

func (k *kit) expectLog(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, entry := range k.logs.TakeAll() {
		got = append(got, entry.Message)
	}
	ok := len(got) == len(want)
	for i := range got {
		ok = ok && strings.Contains(got[i], want[i])
	}
	if !ok {
		t.Errorf("log %q, want %q", got, want)
	}
}

// TestStates: nothing happens before the Provider's first sync; a state changes after the
// threshold, with one line in the log, and back with the first success.
func TestStates(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, k *kit) {
		k.change(func() { k.synced = false })
		k.after(t, time.Hour, StateWaiting)
		if len(k.events)+len(k.dials)+len(k.listeners) != 0 {
			t.Errorf("events %q, %d tests before the first sync, want none", k.events, len(k.dials))
		}
		k.change(func() { k.synced = true })
		s := k.after(t, 10*time.Second, StatePassing)
		if s.VIP != vip4 || s.Endpoint.Addr() != node1 || s.Passed == 0 || s.Failed != 0 || s.LastSuccess.IsZero() {
			t.Errorf("status %+v", s)
		}
		k.expectLog(t, "canary passes")
		k.change(func() { k.dialErr = outage })
		k.after(t, 25*time.Second, StatePassing)
		if got := k.canary.Conditions(); len(got) != 0 {
			t.Errorf("conditions %v before the threshold, want none", got)
		}
		s = k.after(t, 30*time.Second, StateFailing)
		got := k.canary.Extend(k.Status)().Conditions
		if len(got) != 1 || got[0].Type != ConditionCanary || got[0].Family != v1.IPv4Protocol || !got[0].Since.Before(s.Since) ||
			!strings.Contains(got[0].Message, "VIP 192.0.0.7:9 does not reach 192.0.2.1:40001: connect: connect: connection refused: the proxy's rules are gone") {
			t.Errorf("conditions %+v", got)
		}
		k.expectLog(t, "canary fails")
		k.after(t, time.Hour, StateFailing)
		k.expectLog(t)
		k.change(func() { k.dialErr = nil })
		k.after(t, 3*time.Second, StatePassing) // a failing one is tested more often
		if got := k.canary.Conditions(); len(got) != 0 {
			t.Errorf("conditions %v after a success, want none", got)
		}
		k.expectLog(t, "canary passes")
		k.stop()
		if want := []string{"service", "slice", "no service", "no slice"}; !slices.Equal(k.events, want) {
			t.Errorf("events %q, want %q", k.events, want)
		}
	})
}

// TestTheIntervalVaries: tests come every 10 seconds in the mean, and never at a fixed time.
func TestTheIntervalVaries(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, k *kit) {
		k.after(t, 10*time.Second, StatePassing)
		k.change(func() { k.dials = nil })
		k.after(t, 1000*time.Second, StatePassing)
		pauses := map[time.Duration]bool{}
		for i := 1; i < len(k.dials); i++ {
			pause := k.dials[i].Sub(k.dials[i-1])
			if pause < 9*time.Second || pause > 11*time.Second {
				t.Errorf("pause %v, want 9s to 11s", pause)
			}
			pauses[pause] = true
		}
		if len(k.dials) < 90 || len(pauses) < 50 {
			t.Errorf("%d tests with %d different pauses in 1000s, want at least 90 and 50", len(k.dials), len(pauses))
		}
	})
}

// TestOnlyTheEndpointPasses: another program that accepts, closes, echoes or repeats an old
// answer does not pass for the endpoint.
func TestOnlyTheEndpointPasses(t *testing.T) {
	for name, other := range map[string]func(net.Conn){
		"closes": func(c net.Conn) {
			_, _ = c.Read(make([]byte, numberLen))
			_ = c.Close()
		},
		"silent": func(net.Conn) {},
		"echoes": func(c net.Conn) {
			var b number
			_, _ = c.Read(b[:])
			_, _ = c.Write(b[:])
		},
		"half": func(c net.Conn) {
			var b number
			_, _ = c.Read(b[:])
			_, _ = c.Write(b[:5])
			_ = c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Options{}, func(t *testing.T, k *kit) {
				k.after(t, 10*time.Second, StatePassing)
				k.change(func() { k.other = other })
				s := k.after(t, time.Minute, StateFailing)
				want := "another program answered"
				if name == "silent" {
					want = "no answer in time"
				}
				if !strings.Contains(s.Failure, want) {
					t.Errorf("failure %q, want %q", s.Failure, want)
				}
			})
		})
	}
}

// TestTheEndpointAnswersThisProcessOnly: others get no answer, a question is answered once,
// and slow clients neither keep the endpoint from answering nor delay the end.
func TestTheEndpointAnswersThisProcessOnly(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, k *kit) {
		s := k.after(t, 10*time.Second, StatePassing)
		l := k.listeners[s.Endpoint]
		for range 3 * maxClients {
			client, server := net.Pipe()
			defer client.Close()
			l.clients <- server
		}
		k.after(t, 10*time.Second, StatePassing)
		client, server := net.Pipe()
		l.clients <- server
		_, _ = client.Write(make([]byte, numberLen))
		if n, err := client.Read(make([]byte, numberLen)); n != 0 || err == nil {
			t.Errorf("an unknown question got %d bytes, want none", n)
		}
		e := &endpoint{answers: map[number]number{}}
		question, _ := e.ask()
		if _, ok := e.answerTo(question); !ok {
			t.Error("no answer to a question")
		}
		if _, ok := e.answerTo(question); ok {
			t.Error("a second answer to a question")
		}
	})
}

// TestTheEndpointFollowsTheNode: another address of the node gets another endpoint, and the old
// socket is closed. A node without a route is no fault of the data plane.
func TestTheEndpointFollowsTheNode(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, k *kit) {
		before := k.after(t, 10*time.Second, StatePassing).Endpoint
		k.change(func() { k.address = node2 })
		after := k.after(t, 30*time.Second, StatePassing).Endpoint
		if after.Addr() != node2 {
			t.Errorf("endpoint %v, want at %v", after, node2)
		}
		select {
		case <-k.listeners[before].closed:
		default:
			t.Error("the old socket still listens")
		}
		k.expectLog(t, "canary passes")
		k.change(func() { k.routeErr = errors.New("network is unreachable") })
		if s := k.after(t, time.Minute, StateUntested); s.Failure != "network is unreachable" || len(k.canary.Conditions()) != 0 {
			t.Errorf("status %+v, conditions %v", s, k.canary.Conditions())
		}
		k.expectLog(t, "cannot test")
		k.change(func() { k.routeErr = nil })
		k.after(t, time.Minute, StatePassing)
	})
}

// The log has no endpoint before there is one, for example on a node that never had a route.
func TestTheLogHasNoEndpointBeforeThereIsOne(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, k *kit) {
		endpoint := func(message string) (text any) {
			t.Helper()
			for _, entry := range k.logs.FilterMessageSnippet(message).All() {
				return entry.ContextMap()["endpoint"]
			}
			t.Errorf("no log line has %q", message)
			return nil
		}
		k.change(func() { k.routeErr = errors.New("network is unreachable") })
		k.after(t, time.Minute, StateUntested)
		if got := endpoint("cannot test"); got != nil {
			t.Errorf("endpoint %v in the log, want none", got)
		}
		k.change(func() { k.routeErr = nil })
		k.after(t, time.Minute, StatePassing)
		if got := endpoint("canary passes"); got == nil {
			t.Error("no endpoint in the log, want one")
		}
	})
}

// TestExplanations: Options.Explain is asked once in a while, and its answer ends with the
// failure.
func TestExplanations(t *testing.T) {
	asked := 0
	options := Options{Explain: func(ctx context.Context, vip, endpoint netip.AddrPort, connect func(context.Context) error) string {
		asked++
		if err := connect(ctx); err == nil || vip != vip4 || endpoint.Addr() != node1 {
			return "wrong"
		}
		return "stopped by a firewall"
	}}
	inBubble(t, options, func(t *testing.T, k *kit) {
		k.after(t, 10*time.Second, StatePassing)
		k.change(func() { k.dialErr = outage })
		if s := k.after(t, 2*time.Minute, StateFailing); s.Failure != "connect: connect: connection refused: stopped by a firewall" {
			t.Errorf("failure %q", s.Failure)
		}
		if asked < 3 || asked > 5 {
			t.Errorf("asked %d times in 2 minutes, want every 30s", asked)
		}
	})
}

func TestInvalidOptions(t *testing.T) {
	_, err := New(Options{
		VIPs:     []netip.Addr{netip.MustParseAddr("127.0.0.1"), node1, node2, {}},
		Interval: -1, Timeout: -1, Threshold: -1,
	})
	for _, want := range []string{"VIPs: 127.0.0.1: want", "VIPs: 192.0.2.2: want one", "VIPs: invalid IP: want", "Interval: -1ns", "Timeout: -1ns", "Threshold: -1ns"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}

func TestACanaryRunsOnce(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, k *kit) {
		synctest.Wait()
		if err := k.canary.Run(t.Context(), k); err == nil {
			t.Error("a second Run returns nil")
		}
	})
}

// recorder is an Announcer.
type recorder struct{ announced, withdrawn []proxier.Announcement }

func (r *recorder) Announce(_ context.Context, _ v1.IPFamily, a []proxier.Announcement) error {
	r.announced = append(r.announced, a...)
	return nil
}

func (r *recorder) Withdraw(_ context.Context, _ v1.IPFamily, a []proxier.Announcement) error {
	r.withdrawn = append(r.withdrawn, a...)
	return nil
}

// The VIPs of the canary are not announced, and all others are.
func TestTheVIPsAreNotAnnounced(t *testing.T) {
	var own, users proxier.Announcement
	own.Name.Namespace, own.Name.Name = Namespace, serviceOf(vip4).Name
	users.Name.Namespace = "shop"
	r := &recorder{}
	a := WithoutCanary(r)
	for _, list := range [][]proxier.Announcement{{own}, {users, own}, {users}} {
		if err := errors.Join(a.Announce(t.Context(), v1.IPv4Protocol, list), a.Withdraw(t.Context(), v1.IPv4Protocol, list)); err != nil {
			t.Error(err)
		}
	}
	want := []proxier.Announcement{users, users}
	if !slices.Equal(r.announced, want) || !slices.Equal(r.withdrawn, want) {
		t.Errorf("announced %v, withdrawn %v, want %v", r.announced, r.withdrawn, want)
	}
	if WithoutCanary(nil) != nil {
		t.Error("no Announcer became one")
	}
}
