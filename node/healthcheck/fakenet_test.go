package healthcheck

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeNet is the TCP of a host without sockets, so that it works in synctest bubbles.
type fakeNet struct {
	mu        sync.Mutex // guards all below
	listeners map[string]*fakeListener
	refuse    map[string]error // what Listen returns, by network and address
	accept    error            // what every Accept returns when there is a client
	attempts  []time.Time
}

type fakeListener struct {
	net     *fakeNet
	key     string
	clients chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

func newFakeNet() *fakeNet {
	return &fakeNet{listeners: map[string]*fakeListener{}, refuse: map[string]error{}}
}

func (f *fakeNet) Listen(_ context.Context, network, address string) (net.Listener, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.attempts = append(f.attempts, time.Now())
	key := network + " " + address
	err := f.refuse[key]
	for other := range f.listeners {
		if overlap(key, other) {
			err = syscall.EADDRINUSE
		}
	}
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Err: os.NewSyscallError("bind", err)}
	}
	l := &fakeListener{net: f, key: key, clients: make(chan net.Conn, 16), closed: make(chan struct{})}
	f.listeners[key] = l
	return l, nil
}

// overlap reports whether two listeners exclude each other, as on Linux.
func overlap(a, b string) bool {
	networkA, addressA, _ := strings.Cut(a, " ")
	networkB, addressB, _ := strings.Cut(b, " ")
	hostA, portA, _ := net.SplitHostPort(addressA)
	hostB, portB, _ := net.SplitHostPort(addressB)
	wild := func(host string) bool { return host == "" || host == "0.0.0.0" || host == "::" }
	families := networkA == networkB || networkA == "tcp" || networkB == "tcp"
	return portA == portB && families && (hostA == hostB || wild(hostA) || wild(hostB))
}

// open returns the networks and addresses with a listener, sorted.
func (f *fakeNet) open() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var keys []string
	for key := range f.listeners {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

func (f *fakeNet) set(key string, refuse error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse[key] = refuse
}

func (f *fakeNet) failAccept(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.accept = err
}

func (f *fakeNet) tried() []time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.attempts)
}

// kill closes a listener without its server.
func (f *fakeNet) kill(key string) {
	f.mu.Lock()
	l := f.listeners[key]
	f.mu.Unlock()
	_ = l.Close()
}

// dial connects to a listener at one of its addresses.
func (f *fakeNet) dial(key, local string) (net.Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.listeners[key]
	if l == nil {
		return nil, syscall.ECONNREFUSED
	}
	client, server := net.Pipe()
	l.clients <- &fakeConn{server, netip.MustParseAddrPort(local)} // buffered
	return client, nil
}

// ask sends a request, and returns the code and the body of the response.
func (f *fakeNet) ask(t *testing.T, key, local string) (int, string) {
	t.Helper()
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return f.dial(key, local) }}
	defer transport.CloseIdleConnections()
	return ask(t, &http.Client{Transport: transport}, "http://node/")
}

// ask returns code 0 and the error if there is no response.
func ask(t *testing.T, client *http.Client, url string) (code int, body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err.Error()
	}
	return answer.StatusCode, string(text)
}

func (l *fakeListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.clients:
		l.net.mu.Lock()
		fault := l.net.accept
		l.net.mu.Unlock()
		if fault != nil {
			l.clients <- conn // stays in the backlog
			return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", fault)}
		}
		return conn, nil
	case <-l.closed:
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: net.ErrClosed}
	}
}

func (l *fakeListener) Close() error {
	err := errors.New("closed twice")
	l.once.Do(func() {
		close(l.closed)
		l.net.mu.Lock()
		defer l.net.mu.Unlock()
		delete(l.net.listeners, l.key)
		for len(l.clients) > 0 {
			(<-l.clients).Close() // as the kernel resets the connections of its backlog
		}
		err = nil
	})
	return err
}

func (l *fakeListener) Addr() net.Addr { return &net.TCPAddr{} }

type fakeConn struct {
	net.Conn
	local netip.AddrPort
}

func (c *fakeConn) LocalAddr() net.Addr { return fakeAddr{c.local} }

// fakeAddr prints IPv4-mapped IPv6 addresses as such, unlike net.TCPAddr.
type fakeAddr struct{ netip.AddrPort }

func (fakeAddr) Network() string { return "tcp" }
