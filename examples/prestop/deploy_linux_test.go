package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	apps "k8s.io/api/apps/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

// readManifest reads the manifest strictly.
func readManifest(t *testing.T) (roles []rbac.PolicyRule, deployment *apps.Deployment) {
	t.Helper()
	text, err := os.ReadFile("deploy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	subject := rbac.Subject{Kind: rbac.ServiceAccountKind, Name: "web", Namespace: "shop"}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		object, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		var subjects []rbac.Subject
		switch o := object.(type) {
		case *rbac.Role:
			roles = append(roles, o.Rules...)
		case *rbac.ClusterRole:
			roles = append(roles, o.Rules...)
		case *rbac.RoleBinding:
			subjects = o.Subjects
		case *rbac.ClusterRoleBinding:
			subjects = o.Subjects
		case *apps.Deployment:
			deployment = o
		}
		if subjects != nil && !slices.Equal(subjects, []rbac.Subject{subject}) {
			t.Errorf("subjects are %v, want %v", subjects, subject)
		}
	}
	return roles, deployment
}

// guard refuses what the manifest does not grant, and remembers what was used.
type guard struct {
	http.Handler

	mu   sync.Mutex
	used map[string]bool // by "verb resource": whether it was used; guarded by mu
	bad  []string        // guarded by mu
}

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	action := map[bool]string{false: "list ", true: "watch "}[r.URL.Query().Get("watch") != ""] + filepath.Base(r.URL.Path)
	g.mu.Lock()
	_, granted := g.used[action]
	if granted = granted && r.Method == http.MethodGet; granted {
		g.used[action] = true
	} else {
		g.bad = append(g.bad, r.Method+" "+r.URL.Path)
	}
	g.mu.Unlock()
	if !granted {
		http.Error(w, action, http.StatusForbidden)
		return
	}
	g.Handler.ServeHTTP(w, r)
}

// The hook of the manifest, as a static program in an environment that has nothing else, uses all
// rights of the manifest and needs no others.
func TestTheManifest(t *testing.T) {
	t.Parallel()
	roles, deployment := readManifest(t)
	container := deployment.Spec.Template.Spec.Containers[0]
	c := newCluster(t, 1)
	c.put("web", pod("1", false), pod("2", false))
	g := &guard{Handler: c.Server, used: map[string]bool{}}
	for _, rule := range roles {
		for _, verb := range rule.Verbs {
			g.used[verb+" "+rule.Resources[0]] = false
		}
	}
	server := httptest.NewServer(g)
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	text, err := os.ReadFile(c.Config)
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig, first, copied := filepath.Join(t.TempDir(), "k"), filepath.Join(t.TempDir(), "first"), filepath.Join(t.TempDir(), "prestop")
	if err := os.WriteFile(kubeconfig, []byte(strings.ReplaceAll(string(text), c.URL(), server.URL)), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", first, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), first, deployment.Spec.Template.Spec.InitContainers[0].Args[0], copied).CombinedOutput(); err != nil {
		t.Fatalf("copy: %v\n%s", err, out)
	}
	hook := exec.CommandContext(t.Context(), copied, container.Lifecycle.PreStop.Exec.Command[1:]...)
	hook.Args = append(hook.Args, "--kubeconfig="+kubeconfig, "--port="+c.Port, "--deadline=10m")
	for _, e := range container.Env {
		hook.Env = append(hook.Env, e.Name+"="+map[string]string{"metadata.name": "pod-1", "metadata.namespace": "shop", "status.podIPs": "10.244.0.1"}[e.ValueFrom.FieldRef.FieldPath])
	}
	var output strings.Builder
	hook.Stderr = &output
	if err := hook.Start(); err != nil {
		t.Fatal(err)
	}
	c.watched()
	c.put("web", pod("1", true), pod("2", false))
	if err := hook.Wait(); err != nil || output.Len() > 0 {
		t.Errorf("the hook ended with %v and %q, want status 0 and nothing", err, output.String())
	}
	if c.Nodes[0].Sends("web", "10.244.0.1") {
		t.Error("the node still sends to the pod")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for action, used := range g.used {
		if !used {
			t.Errorf("the manifest grants %q, which is not used", action)
		}
	}
	if len(g.bad) > 0 {
		t.Errorf("the manifest lacks %q", g.bad)
	}
}
