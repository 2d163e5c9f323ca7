// Package apitest is a small Kubernetes API server for tests: it lists and watches
// Services, EndpointSlices, Nodes and ServiceCIDRs, over real HTTP, and it can go
// away and come back.
package apitest

import (
	"cmp"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
)

// Options say what kind of API server it is.
type Options struct {
	// WatchList streams lists to clients that ask for it. Without, such requests are
	// refused, as by an API server that does not know the feature.
	WatchList bool
	// Listener is where to serve; nil means a port of 127.0.0.1.
	Listener net.Listener
	// Listen opens the listener again for Start; nil means the same address, from
	// the network namespace of the test.
	Listen func() (net.Listener, error)
	// Warning is a header of every answer, as of an API that is deprecated.
	Warning string
	// Hidden are resources that it does not have, such as "servicecidrs".
	Hidden []string
}

// Server is a running API server. Its methods may be called from several
// goroutines at once.
type Server struct {
	options Options
	address string

	mu        sync.Mutex // guards all below, except serving
	version   uint64
	oldest    uint64                               // watches that begin before it are too old
	forgotten uint64                               // the version of the last change that Compact dropped
	stored    map[string]map[string]runtime.Object // by resource and by namespace/name
	history   []change
	changed   chan struct{} // closed with the next change
	requests  []string
	running   *http.Server
	serving   sync.WaitGroup
}

// New starts a server that ends with the test.
func New(tb testing.TB, o Options) *Server {
	tb.Helper()
	if o.Listener == nil {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			tb.Fatalf("listen: %v", err)
		}
		o.Listener = l
	}
	s := &Server{
		options: o, address: o.Listener.Addr().String(), version: 1, // 0 means any to clients
		stored: map[string]map[string]runtime.Object{}, changed: make(chan struct{}),
	}
	if o.Listen == nil {
		s.options.Listen = func() (net.Listener, error) { return listenAgain(s.address) }
	}
	s.serve(tb, o.Listener)
	tb.Cleanup(s.Stop)
	return s
}

// URL is the address of the server, also while it is away.
func (s *Server) URL() string { return "http://" + s.address }

// Kubeconfig writes a configuration for clients of the server.
func (s *Server) Kubeconfig(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "kubeconfig")
	text := `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "` + s.URL() + `"}}]
users: [{name: test, user: {}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
current-context: test
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		tb.Fatalf("write kubeconfig: %v", err)
	}
	return path
}

// Stop takes the server away: nobody listens, and all connections are cut. The
// objects stay.
func (s *Server) Stop() {
	s.mu.Lock()
	server := s.running
	s.running = nil
	s.mu.Unlock()
	if server != nil {
		_ = server.Close() // what it says about connections that it cut is no news
	}
	s.serving.Wait()
}

// Start brings the server back to its address.
func (s *Server) Start(tb testing.TB) {
	tb.Helper()
	l, err := s.options.Listen()
	if err != nil {
		tb.Fatalf("listen again: %v", err)
	}
	s.serve(tb, l)
}

// listenAgain is patient: another connection of the machine may have been given
// the port meanwhile.
func listenAgain(address string) (net.Listener, error) {
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(50 * time.Millisecond) {
		l, err := net.Listen("tcp", address)
		if err == nil || time.Now().After(deadline) {
			return l, err
		}
	}
}

func (s *Server) serve(tb testing.TB, l net.Listener) {
	tb.Helper()
	server := &http.Server{Handler: s}
	s.mu.Lock()
	s.running = server
	s.mu.Unlock()
	s.serving.Go(func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			tb.Errorf("serve: %v", err)
		}
	})
}

// Requests are all lists and watches so far with their parameters, such as
// "LIST services?labelSelector=a=b" and "WATCH nodes?sendInitialEvents=true&…".
func (s *Server) Requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// note remembers a request. What says how to watch stands first, the other
// parameters follow by name, all of them readable.
func (s *Server) note(verb, resource string, query url.Values) {
	const first = "sendInitialEvents"
	var parameters []string
	if verb == "WATCH" {
		parameters = append(parameters, first+"="+cmp.Or(query.Get(first), "false"))
	}
	for _, name := range slices.Sorted(maps.Keys(query)) {
		if name != first && name != "watch" {
			parameters = append(parameters, name+"="+query.Get(name))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, verb+" "+resource+"?"+strings.Join(parameters, "&"))
}
