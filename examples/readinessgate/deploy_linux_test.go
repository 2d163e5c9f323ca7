package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

// readManifest reads the manifest strictly.
func readManifest(t *testing.T) (rights map[string]bool, deployment *apps.Deployment) {
	t.Helper()
	text, err := os.ReadFile("deploy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	subject := rbac.Subject{Kind: rbac.ServiceAccountKind, Name: "readinessgate", Namespace: "kube-system"}
	rights = map[string]bool{}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		object, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		switch o := object.(type) {
		case *rbac.ClusterRole:
			for _, rule := range o.Rules {
				for _, verb := range rule.Verbs {
					rights[verb+" "+rule.APIGroups[0]+"/"+rule.Resources[0]] = false
				}
			}
		case *rbac.ClusterRoleBinding:
			if !slices.Equal(o.Subjects, []rbac.Subject{subject}) || o.RoleRef.Name != "readinessgate" {
				t.Errorf("the binding is %v, want %v", o, subject)
			}
		case *apps.Deployment:
			deployment = o
		case *v1.ServiceAccount:
			if o.Name != subject.Name || o.Namespace != subject.Namespace {
				t.Errorf("the service account is %v, want %v", o, subject)
			}
		}
	}
	return rights, deployment
}

// guard refuses what the manifest does not grant, and remembers what was used.
type guard struct {
	http.Handler

	mu   sync.Mutex
	used map[string]bool // by "verb group/resource": whether it was used; guarded by mu
	bad  []string        // guarded by mu
}

// action returns what a request needs the right for.
func action(r *http.Request) string {
	path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	group, rest := "", path[2:] // api/v1/…
	if path[0] == "apis" {
		group, rest = path[1], path[3:]
	}
	if len(rest) > 2 && rest[0] == "namespaces" {
		rest = rest[2:]
	}
	verb := map[string]string{http.MethodPost: "create", http.MethodDelete: "delete", http.MethodPatch: "patch", http.MethodPut: "update", http.MethodGet: "list"}[r.Method]
	switch {
	case r.Method != http.MethodGet:
	case r.URL.Query().Get("watch") != "":
		verb = "watch"
	case len(rest) > 1:
		verb = "get"
	}
	resource := rest[0]
	if len(rest) > 2 {
		resource += "/" + rest[2]
	}
	return verb + " " + group + "/" + resource
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	needed := action(r)
	g.mu.Lock()
	_, granted := g.used[needed]
	if granted {
		g.used[needed] = true
	} else {
		g.bad = append(g.bad, needed)
	}
	g.mu.Unlock()
	if !granted {
		http.Error(w, needed, http.StatusForbidden)
		return
	}
	g.Handler.ServeHTTP(w, r)
}

// The controller of the manifest uses all rights of the manifest, and needs no others.
func TestTheManifest(t *testing.T) {
	t.Parallel()
	rights, deployment := readManifest(t)
	c := newCluster(t, 1)
	g := &guard{Handler: c.Server, used: rights}
	server := httptest.NewServer(g)
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	text, err := os.ReadFile(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	c.Config = filepath.Join(t.TempDir(), "k")
	if err := os.WriteFile(c.Config, []byte(strings.ReplaceAll(string(text), c.URL(), server.URL)), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Put(t, pod())
	_, stop := c.start(deployment.Spec.Template.Spec.Containers[0].Args...)
	c.opens("pod-1")
	c.official("web", true)
	c.waitOurs(0)
	stop()
	g.mu.Lock()
	defer g.mu.Unlock()
	for needed, used := range g.used {
		if !used {
			t.Errorf("the manifest grants %q, which is not used", needed)
		}
	}
	if len(g.bad) > 0 {
		t.Errorf("the manifest lacks %q", g.bad)
	}
}
