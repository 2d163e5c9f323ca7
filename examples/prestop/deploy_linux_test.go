package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
)

// The hook of the manifest, as a static program in an environment that has nothing else, uses all
// rights of the manifest and needs no others.
func TestTheManifest(t *testing.T) {
	t.Parallel()
	manifest := apitest.ReadManifest(t, "deploy.yaml")
	deployment := apitest.The[*apps.Deployment](t, manifest)
	pods := deployment.Spec.Template.Spec
	container := pods.Containers[0]
	c := newCluster(t, 1)
	c.put("web", pod("1", false), pod("2", false))
	account := apitest.NewAccount(c.Server, deployment.Namespace, pods.ServiceAccountName, manifest...)
	first, copied := filepath.Join(t.TempDir(), "first"), filepath.Join(t.TempDir(), "prestop")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", first, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), first, pods.InitContainers[0].Args[0], copied).CombinedOutput(); err != nil {
		t.Fatalf("copy: %v\n%s", err, out)
	}
	hook := exec.CommandContext(t.Context(), copied, container.Lifecycle.PreStop.Exec.Command[1:]...)
	hook.Args = append(hook.Args, "--kubeconfig="+account.Kubeconfig(t), "--port="+c.Port, "--deadline=10m")
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
	account.ExpectExact(t)
}
