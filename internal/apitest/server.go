// Package apitest is a small Kubernetes API server for tests. It serves lists and watches
// of Services, EndpointSlices, Nodes, Pods and ServiceCIDRs over HTTP, and of other Resources, and
// can be stopped and started again. Clients may also write objects, one at a time.
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

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// Options configure a Server.
type Options struct {
	// WatchList serves streamed lists. Without it, requests for them are refused, as by an
	// API server without the feature.
	WatchList bool
	// Protobuf is served to clients that accept it, for lists and watches of what every Server has.
	// Without it, all get JSON.
	Protobuf bool
	// Listener is the listener of the server; nil means one on 127.0.0.1.
	Listener net.Listener
	// Listen opens the listener for Start; nil means the same address, in the network
	// namespace of the test.
	Listen func() (net.Listener, error)
	// Warning is the Warning header of every response, as for a deprecated API.
	Warning string
	// Hidden lists resources that are not served, such as "servicecidrs".
	Hidden []string
	// Forbidden lists resources that the client has no permission for.
	Forbidden []string
	// Resources are served besides those that every Server has.
	Resources []Resource
	// Admit may change an object that a client writes, or refuse it with an error. The old one
	// is nil if there was none.
	Admit func(before, after *unstructured.Unstructured) error
}

// Server is an API server. Its methods are safe for concurrent use.
type Server struct {
	options   Options
	address   string
	resources []Resource
	binary    *binary
	writing   sync.Mutex // held while a client's request for one object is answered

	mu        sync.Mutex // guards all below, except serving
	version   uint64
	oldest    uint64                      // the first version that a watch may start from
	compacted uint64                      // the version of the last change that Compact dropped
	stored    map[string]map[string]entry // by resource and by namespace/name
	history   []change
	changed   chan struct{} // closed at the next change
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
		options: o, address: o.Listener.Addr().String(), resources: slices.Concat(builtin(), o.Resources), version: 1, // clients use 0 for any version
		stored: map[string]map[string]entry{}, changed: make(chan struct{}), binary: newBinary(tb),
	}
	if o.Listen == nil {
		s.options.Listen = func() (net.Listener, error) { return listenAgain(s.address) }
	}
	s.serve(tb, o.Listener)
	tb.Cleanup(s.Stop)
	return s
}

// URL returns the address of the server, also while it is stopped.
func (s *Server) URL() string { return "http://" + s.address }

// Kubeconfig writes a kubeconfig file for clients of the server, and returns its path.
func (s *Server) Kubeconfig(tb testing.TB) string { tb.Helper(); return kubeconfig(tb, s.URL()) }

func kubeconfig(tb testing.TB, url string) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "kubeconfig")
	text := `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "` + url + `"}}]
users: [{name: test, user: {}}]
contexts: [{name: test, context: {cluster: test, user: test}}]
current-context: test
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		tb.Fatalf("write kubeconfig: %v", err)
	}
	return path
}

// Stop closes the listener and all connections. The objects stay.
func (s *Server) Stop() {
	s.mu.Lock()
	server := s.running
	s.running = nil
	s.mu.Unlock()
	if server != nil {
		_ = server.Close() // errors are about connections that it closed
	}
	s.serving.Wait()
}

// Start serves again, at the same address.
func (s *Server) Start(tb testing.TB) {
	tb.Helper()
	l, err := s.options.Listen()
	if err != nil {
		tb.Fatalf("listen again: %v", err)
	}
	s.serve(tb, l)
}

// listenAgain retries: an outgoing connection may have been given the port meanwhile.
func listenAgain(address string) (l net.Listener, err error) {
	poll.Soon(func() bool { l, err = net.Listen("tcp", address); return err == nil })
	return l, err
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

// Requests returns all lists and watches so far with their parameters, such as
// "LIST services?labelSelector=a=b" and "WATCH nodes?sendInitialEvents=true&…".
func (s *Server) Requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// record stores a request. The parameter that selects streamed lists comes first, the
// others follow in the order of their names.
func (s *Server) record(verb, resource string, query url.Values) {
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
