package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

// deployment is what deploy/daemonset.yaml holds.
type deployment struct {
	settings  v1.ConfigMap
	account   v1.ServiceAccount
	role      rbac.ClusterRole
	binding   rbac.ClusterRoleBinding
	daemonSet apps.DaemonSet
}

// readDeployment reads the manifest. A field that does not exist, or is there twice, fails.
func readDeployment(t *testing.T) *deployment {
	t.Helper()
	text, err := os.ReadFile("deploy/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	d := &deployment{}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	for documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return d
		}
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		d.keep(t, object)
	}
}

func (d *deployment) keep(t *testing.T, object k8sruntime.Object) {
	t.Helper()
	switch o := object.(type) {
	case *v1.ConfigMap:
		d.settings = *o
	case *v1.ServiceAccount:
		d.account = *o
	case *rbac.ClusterRole:
		d.role = *o
	case *rbac.ClusterRoleBinding:
		d.binding = *o
	case *apps.DaemonSet:
		d.daemonSet = *o
	default:
		t.Fatalf("the manifest has a %T", object)
	}
}

func (d *deployment) container() *v1.Container { return &d.daemonSet.Spec.Template.Spec.Containers[0] }

// clusterIP is the Service of the API server, which kubelets tell every container of.
const clusterIP = "10.96.0.1"

// environment is the container's, as the kubelet of node-1 makes it: the variables of
// Services, over them those of ConfigMaps, over them the container's own.
func (d *deployment) environment(t *testing.T) map[string]string {
	t.Helper()
	c := d.container()
	env := map[string]string{
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOSTNAME": "node-1", "HOME": "/",
		"KUBERNETES_SERVICE_HOST": clusterIP, "KUBERNETES_SERVICE_PORT": "443",
	}
	for _, from := range c.EnvFrom {
		if from.ConfigMapRef == nil || from.ConfigMapRef.Name != d.settings.Name {
			t.Fatalf("environment from %+v, want it from ConfigMap %s", from, d.settings.Name)
		}
		maps.Copy(env, d.settings.Data)
	}
	for _, own := range c.Env {
		env[own.Name] = own.Value
		switch {
		case own.ValueFrom == nil:
		case own.ValueFrom.FieldRef != nil && own.ValueFrom.FieldRef.FieldPath == "spec.nodeName":
			env[own.Name] = "node-1"
		default:
			t.Fatalf("environment variable %s from %+v, want it from a field that the test knows", own.Name, own.ValueFrom)
		}
	}
	return env
}

// command is the container's command line, after the kubelet's expansion.
func (d *deployment) command(t *testing.T, image *image) []string {
	t.Helper()
	c := d.container()
	command := slices.Concat(c.Command, c.Args)
	if len(c.Command) == 0 {
		command = slices.Concat(image.entrypoint, c.Args)
	}
	for i := range command {
		for name, value := range d.environment(t) {
			command[i] = strings.ReplaceAll(command[i], "$("+name+")", value)
		}
	}
	return command
}

// probe is where the kubelet asks. The pod's address is the node's.
func (d *deployment) probe(t *testing.T, p *v1.Probe) (address, path string) {
	t.Helper()
	if p == nil || p.HTTPGet == nil {
		t.Fatalf("probe %+v, want one over HTTP", p)
	}
	port := p.HTTPGet.Port.IntVal
	for _, named := range d.container().Ports {
		if named.Name == p.HTTPGet.Port.StrVal {
			port = named.ContainerPort
		}
	}
	return fmt.Sprintf("%s:%d", cmp.Or(p.HTTPGet.Host, "192.0.2.10"), port), p.HTTPGet.Path
}

// image is what deploy/Dockerfile makes.
type image struct {
	binary     string // where the test has built it
	path       string // of the binary in the image
	entrypoint []string
}

// instruction is one line of a Dockerfile, with those that continue it.
type instruction struct{ name, rest string }

func instructions(t *testing.T) []instruction {
	t.Helper()
	text, err := os.ReadFile("deploy/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	var all []instruction
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
		if name, rest, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			all = append(all, instruction{name, rest})
		}
	}
	return all
}

// buildImage runs the Dockerfile's own command for the binary, on the checkout.
func buildImage(t *testing.T) *image {
	t.Helper()
	all := instructions(t)
	i := slices.IndexFunc(all, func(i instruction) bool { return i.name == "RUN" && strings.Contains(i.rest, "go build") })
	last := slices.Index(all, instruction{"FROM", "scratch"})
	if i < 0 || last < i || len(all) != last+3 {
		t.Fatalf("the Dockerfile is %v, want a stage that builds and one of COPY and ENTRYPOINT from scratch", all)
	}
	var from, built, path string
	_, err := fmt.Sscan(all[last+1].rest, &from, &built, &path)
	if err != nil || all[last+1].name != "COPY" || from != "--from=build" || strings.Count(all[i].rest, "-o "+built+" ") != 1 {
		t.Fatalf("the image gets %v, want what the compiler writes", all[last+1])
	}
	made := &image{binary: filepath.Join(t.TempDir(), "nodeproxy"), path: path}
	if err := json.Unmarshal([]byte(all[last+2].rest), &made.entrypoint); err != nil || all[last+2].name != "ENTRYPOINT" {
		t.Fatalf("%v: %v, want an ENTRYPOINT", all[last+2], err)
	}
	build := exec.CommandContext(t.Context(), "sh", "-ec", strings.Replace(all[i].rest, "-o "+built+" ", "-o '"+made.binary+"' ", 1))
	build.Dir = "../.."
	build.Env = append(os.Environ(), "TARGETARCH="+runtime.GOARCH)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", all[i].rest, err, out)
	}
	return made
}
