package manifests

import (
	"strings"
	"testing"
	"testing/fstest"
)

func TestErrorsNameFileAndLine(t *testing.T) {
	for name, c := range map[string]struct {
		files fstest.MapFS
		want  []string
	}{
		"no files":      {fstest.MapFS{"a.txt": {}, ".b.yaml": {}}, []string{"no YAML or JSON files"}},
		"no file":       {fstest.MapFS{"a.yaml/b": {}}, []string{"a.yaml: it is not a regular file"}},
		"broken YAML":   {fstest.MapFS{"a.yaml": {Data: []byte("kind: X\n---\nkind:\n- {")}}, []string{"a.yaml:1: ", "a.yaml:3: ", "yaml: line 4: "}},
		"unknown kind":  {fstest.MapFS{"a.yml": {Data: []byte("# nothing\n---\nkind: Pod\napiVersion: v1\n")}}, []string{"a.yml:3: ", `"Pod"`}},
		"unknown field": {fstest.MapFS{"a.yaml": {Data: []byte("\nkind: Service\napiVersion: v1\nspec: {prots: []}\n")}}, []string{`a.yaml:2: `, `"spec.prots"`}},
		"no name":       {fstest.MapFS{"a.yaml": {Data: []byte("kind: Service\napiVersion: v1\n")}}, []string{"a.yaml:1: metadata.name is missing"}},
		"all of them": {
			fstest.MapFS{"a.yaml": {Data: []byte("kind: X")}, "b.json": {Data: []byte("{\n]")}},
			[]string{"a.yaml:1: ", "b.json:1: "},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Read(c.files)
			for _, want := range c.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("Read = %v, want an error with %q", err, want)
				}
			}
		})
	}
}

// TestDefaults: a proxy finds in an object what the API server would have added.
func TestDefaults(t *testing.T) {
	all, err := Read(fstest.MapFS{"a.yaml": {Data: []byte(`
--- # a list, as kubectl prints it
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Node, metadata: {name: a}}
- {apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIPs: [10.96.0.1, "fd00::1"], ports: [{port: 80}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1}
addressType: IPv4
ports: [{port: 8080}]
---
`)}})
	if err != nil || len(all.Services) != 1 || len(all.Slices) != 1 {
		t.Fatalf("Read = %+v, %v, want a Service and an EndpointSlice", all, err)
	}
	service, slice := all.Services[0], all.Slices[0]
	if service.Namespace != "default" || service.Spec.ClusterIP != "10.96.0.1" || len(service.Spec.IPFamilies) != 2 || service.Spec.IPFamilies[1] != "IPv6" || service.Spec.Ports[0].Protocol != "TCP" {
		t.Errorf("the Service is %+v", service)
	}
	if slice.Namespace != "default" || slice.Ports[0].Name == nil {
		t.Errorf("the EndpointSlice is %+v", slice)
	}
}
