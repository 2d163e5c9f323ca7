package apitest

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	apps "k8s.io/api/apps/v1"
	coordination "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// ReadManifest returns the objects of a manifest. Unknown and duplicate fields fail the test.
// Options are lines that are comments until a user wants them, after "# OPTION NAME: ".
func ReadManifest(tb testing.TB, path string, options ...string) (all []runtime.Object) {
	tb.Helper()
	read, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	text := string(read)
	for _, option := range options {
		text = strings.ReplaceAll(text, "# OPTION "+option+": ", "")
	}
	scheme := newScheme(tb, v1.AddToScheme, apps.AddToScheme, rbac.AddToScheme, coordination.AddToScheme)
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	for document := range strings.SplitSeq(text, "\n---\n") {
		object, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			tb.Fatalf("%v in\n%s", err, document)
		}
		all = append(all, object)
	}
	return all
}

// The returns the only object of its type in a manifest.
func The[T runtime.Object](tb testing.TB, manifest []runtime.Object) (object T) {
	tb.Helper()
	found := 0
	for _, o := range manifest {
		if o, ok := o.(T); ok {
			object, found = o, found+1
		}
	}
	if found != 1 {
		tb.Fatalf("the manifest has %d objects of the type %T, want 1", found, object)
	}
	return object
}

// Account is an API server as a service account reaches it: requests that its roles do not grant
// are refused.
type Account struct {
	api http.Handler

	mu      sync.Mutex
	granted map[right]bool // whether it was used; guarded by mu
	refused []right        // guarded by mu
}

// right is what a rule of RBAC grants, or what a request needs. An empty namespace or name in a
// grant stands for all.
type right struct{ verb, resource, namespace, name string }

// NewAccount returns the API server for a service account with the roles that a manifest binds
// it to.
func NewAccount(api http.Handler, namespace, name string, manifest ...runtime.Object) *Account {
	a := &Account{api: api, granted: map[right]bool{}}
	subject := rbac.Subject{Kind: rbac.ServiceAccountKind, Namespace: namespace, Name: name}
	for _, object := range manifest {
		switch binding := object.(type) {
		case *rbac.RoleBinding:
			if slices.Contains(binding.Subjects, subject) {
				a.grant(binding.Namespace, binding.RoleRef, manifest)
			}
		case *rbac.ClusterRoleBinding:
			if slices.Contains(binding.Subjects, subject) {
				a.grant("", binding.RoleRef, manifest)
			}
		}
	}
	return a
}

// grant adds the rules of a role, in one namespace or in all.
func (a *Account) grant(namespace string, ref rbac.RoleRef, manifest []runtime.Object) {
	for _, object := range manifest {
		var rules []rbac.PolicyRule
		switch role := object.(type) {
		case *rbac.Role:
			if ref.Kind == "Role" && ref.Name == role.Name && namespace == role.Namespace {
				rules = role.Rules
			}
		case *rbac.ClusterRole:
			if ref.Kind == "ClusterRole" && ref.Name == role.Name {
				rules = role.Rules
			}
		}
		for _, rule := range rules {
			a.grantRule(namespace, rule)
		}
	}
}

func (a *Account) grantRule(namespace string, rule rbac.PolicyRule) {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, verb := range rule.Verbs {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, name := range names {
					a.granted[right{verb, group + "/" + resource, namespace, name}] = false
				}
			}
		}
	}
}

// ServeHTTP answers a request if it is granted.
func (a *Account) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	needed := needs(r)
	a.mu.Lock()
	granted := false
	for have := range a.granted {
		if have.covers(needed) {
			granted, a.granted[have] = true, true
		}
	}
	if !granted {
		a.refused = append(a.refused, needed)
	}
	a.mu.Unlock()
	if !granted {
		http.Error(w, fmt.Sprint(needed), http.StatusForbidden)
		return
	}
	a.api.ServeHTTP(w, r)
}

func (r right) covers(needed right) bool {
	return r.verb == needed.verb && r.resource == needed.resource &&
		(r.namespace == "" || r.namespace == needed.namespace) && (r.name == "" || r.name == needed.name)
}

// needs returns what a request needs. A list needs the name that it selects by a field.
func needs(r *http.Request) right {
	t, ok := splitPath(r.URL.Path)
	if !ok {
		return right{verb: r.Method, resource: r.URL.Path} // which no rule of a manifest grants
	}
	n := right{
		verb:     map[string]string{http.MethodGet: "list", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method],
		resource: t.Group + "/" + t.Name, namespace: t.namespace, name: t.name,
	}
	if t.sub != "" {
		n.resource += "/" + t.sub
	}
	query := r.URL.Query()
	switch {
	case n.verb != "list":
	case n.name != "":
		n.verb = "get"
	default:
		if selector, err := fields.ParseSelector(query.Get("fieldSelector")); err == nil {
			n.name, _ = selector.RequiresExactMatch(metav1.ObjectNameField)
		}
		if query.Get("watch") != "" {
			n.verb = "watch"
		}
	}
	return n
}

// Kubeconfig serves the account until the test ends, and writes a kubeconfig file for it.
func (a *Account) Kubeconfig(tb testing.TB) string {
	tb.Helper()
	return kubeconfig(tb, a.Serve(tb, nil))
}

// Serve serves the account at a listener until the test ends, and returns its URL. Without a
// listener, it opens one on 127.0.0.1.
func (a *Account) Serve(tb testing.TB, l net.Listener) string {
	tb.Helper()
	server, stop := ServeAt(l, a)
	tb.Cleanup(stop)
	return server.URL
}

// ServeAt serves at a listener until stop. Without a listener, it opens one on 127.0.0.1.
func ServeAt(l net.Listener, handler http.Handler) (server *httptest.Server, stop func()) {
	server = httptest.NewUnstartedServer(handler)
	if l != nil {
		_ = server.Listener.Close()
		server.Listener = l
	}
	server.Start()
	return server, func() { server.CloseClientConnections(); server.Close() }
}

// ExpectExact waits until every right was used, and fails the test if a request was refused.
func (a *Account) ExpectExact(tb testing.TB) {
	tb.Helper()
	poll.Nil(tb, "requests to the API server", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		for r, used := range a.granted {
			if !used {
				return fmt.Errorf("the manifest grants %v, which is not used", r)
			}
		}
		return nil
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.refused) > 0 {
		tb.Errorf("the manifest lacks %v", a.refused)
	}
}
