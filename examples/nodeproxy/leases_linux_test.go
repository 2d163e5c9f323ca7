package main

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	coordination "k8s.io/api/coordination/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/programmed"
	"github.com/serviceplane/serviceplane/programmed/cluster"
)

// leaseRights refuses the requests about Leases that a Role does not grant.
type leaseRights struct {
	http.Handler

	mu   sync.Mutex
	used map[string]bool // by verb and name, such as "get NAME" and "list *"; guarded by mu
	bad  []string        // guarded by mu
}

func newLeaseRights(h http.Handler, role *rbac.Role) *leaseRights {
	l := &leaseRights{Handler: h, used: map[string]bool{}}
	for _, rule := range role.Rules {
		for _, verb := range rule.Verbs {
			l.used[verb+" "+append(rule.ResourceNames, "*")[0]] = false
		}
	}
	return l
}

func (l *leaseRights) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !strings.Contains(r.URL.Path, "/leases") {
		l.Handler.ServeHTTP(w, r)
		return
	}
	name, query := path.Base(r.URL.Path), r.URL.Query()
	verb := map[string]string{http.MethodGet: "get", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodPost: "create"}[r.Method]
	if name == "leases" && verb == "get" {
		name = strings.TrimPrefix(query.Get("fieldSelector"), "metadata.name=")
		if verb = "list"; query.Get("watch") != "" {
			verb = "watch"
		}
	}
	l.mu.Lock()
	granted := false
	for _, right := range []string{verb + " " + name, verb + " *"} {
		if _, has := l.used[right]; has {
			granted, l.used[right] = true, true
		}
	}
	if !granted {
		l.bad = append(l.bad, verb+" "+name)
	}
	l.mu.Unlock()
	if !granted {
		http.Error(w, "no right", http.StatusForbidden)
		return
	}
	l.Handler.ServeHTTP(w, r)
}

func (l *leaseRights) check(t *testing.T, whose string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for right, used := range l.used {
		if !used {
			t.Errorf("the Role of %s grants %q, which is not used", whose, right)
		}
	}
	if len(l.bad) > 0 {
		t.Errorf("the Role of %s lacks %q", whose, l.bad)
	}
}

// serve serves a handler at a listener until the test ends, and returns its URL.
func serve(t *testing.T, l net.Listener, h http.Handler) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	_ = s.Listener.Close()
	s.Listener = l
	s.Start()
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s.URL
}

// TestLeases: nodeproxy says through the API server what it has programmed, with the rights and the
// switch of the manifest, which all are needed.
func TestLeases(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("deploy/programmed-leases.yaml")
	netnstest.Check(t, err)
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	var roles []*rbac.Role
	var lease runtime.Object
	for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
		object, _, err := decoder.Decode(document, nil, nil)
		netnstest.Check(t, err)
		switch o := object.(type) {
		case *rbac.Role:
			roles = append(roles, o)
		case *coordination.Lease:
			lease = o
		case *rbac.RoleBinding:
			if o.RoleRef.Name != roles[0].Name || !slices.Equal(o.Subjects, readDeployment(t).binding.Subjects) {
				t.Errorf("the binding is %+v, want one of nodeproxy", o)
			}
		}
	}
	c := newSmall(t)
	api := apitest.New(t, apitest.Options{Resources: []apitest.Resource{{GroupVersionKind: coordination.SchemeGroupVersion.WithKind("Lease"), Name: "leases"}}})
	api.Put(t, lease)
	for _, o := range objects(t, thisNode+"---\n"+webService+"---\n"+webSlices(1)) {
		api.Put(t, o.Value)
	}
	inNode, err := c.node.Listen(t.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(t, err)
	here, err := net.Listen("tcp", "127.0.0.1:0")
	netnstest.Check(t, err)
	proxy, waiter := newLeaseRights(api, roles[0]), newLeaseRights(api, roles[1])
	p := start(t, c.node, "--master="+serve(t, inNode, proxy), "--programmed-lease-namespace=kube-system", "--state-dir="+t.TempDir())
	p.waitHealthy()
	client, err := cluster.New(&rest.Config{Host: serve(t, here, waiter)})
	netnstest.Check(t, err)
	for _, o := range objects(t, webSlices(2)) {
		api.Put(t, o.Value)
	}
	ctx, end := context.WithCancel(t.Context())
	w, stop, err := client.Leased(ctx, cluster.LeaseOptions{Namespace: "kube-system"})
	netnstest.Check(t, err)
	defer func() { end(); stop() }()
	version := strconv.FormatUint(api.Version(), 10)
	if err := programmed.Wait(ctx, w, programmed.Change{Service: types.NamespacedName{Namespace: "default", Name: "web"}, Versions: changetracker.Versions{EndpointSlices: version}}); err != nil {
		t.Error(err)
	}
	c.expectNow("pod-2")
	proxy.check(t, "nodeproxy")
	waiter.check(t, "a waiter")
}
