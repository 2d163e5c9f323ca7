package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	runtimeschema "k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/yaml"

	"github.com/serviceplane/serviceplane/internal/apitest"
)

// resource is a kind of the Gateway API's CRDs, with what an API server makes of the schema:
// defaults and validation, also by CEL rules.
type resource struct {
	apitest.Resource
	text       []byte
	structural *schema.Structural
	schema     validation.SchemaValidator
	rules      *cel.Validator
}

// readCRDs reads the CRDs of the standard channel, once for all tests.
var readCRDs = sync.OnceValues(func() (map[runtimeschema.GroupVersionKind]*resource, error) {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	if err != nil {
		return nil, fmt.Errorf("find the Gateway API: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "config/crd/standard/gateway.*.yaml"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no CRDs in %s: %w", dir, err)
	}
	all := map[runtimeschema.GroupVersionKind]*resource{}
	for _, file := range files {
		if err := readCRD(file, all); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	return all, nil
})

func readCRD(file string, all map[runtimeschema.GroupVersionKind]*resource) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var crd extensions.CustomResourceDefinition
	if err := yaml.Unmarshal(text, &crd); err != nil {
		return err
	}
	for _, v := range crd.Spec.Versions {
		if v.Name != "v1" || crd.Kind != "CustomResourceDefinition" {
			continue
		}
		var internal apiextensions.JSONSchemaProps
		if err := extensions.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(v.Schema.OpenAPIV3Schema, &internal, nil); err != nil {
			return err
		}
		r := &resource{text: text}
		r.Name, r.GroupVersionKind = crd.Spec.Names.Plural, runtimeschema.GroupVersionKind{Group: crd.Spec.Group, Version: v.Name, Kind: crd.Spec.Names.Kind}
		if r.structural, err = schema.NewStructural(&internal); err != nil {
			return err
		}
		if r.schema, _, err = validation.NewSchemaValidator(&internal); err != nil {
			return err
		}
		r.rules = cel.NewValidator(r.structural, true, celconfig.PerCallLimit)
		all[r.GroupVersionKind] = r
	}
	return nil
}

func crds(tb testing.TB) map[runtimeschema.GroupVersionKind]*resource {
	tb.Helper()
	all, err := readCRDs()
	if err != nil {
		tb.Fatal(err)
	}
	return all
}

// admit sets the defaults of the CRDs, and refuses an object that is invalid by them.
func admit(tb testing.TB) func(before, after *unstructured.Unstructured) error {
	tb.Helper()
	all := crds(tb)
	return func(before, after *unstructured.Unstructured) error {
		r := all[after.GroupVersionKind()]
		if r == nil {
			return nil
		}
		defaulting.Default(after.Object, r.structural)
		defaulting.PruneNonNullableNullsWithoutDefaults(after.Object, r.structural)
		var old map[string]any
		if before != nil {
			old = before.Object
		}
		faults := validation.ValidateCustomResource(field.NewPath(""), after.Object, r.schema)
		var previous any // an untyped nil on creation
		if old != nil {
			previous = old
		}
		more, _ := r.rules.Validate(tb.Context(), field.NewPath(""), r.structural, after.Object, previous, celconfig.RuntimeCELCostBudget)
		var errs []error
		for _, f := range append(faults, more...) {
			errs = append(errs, f)
		}
		return errors.Join(errs...)
	}
}

// TestTheCRDsRefuseInvalidObjects: otherwise the other tests would not prove that the statuses
// which the program writes are valid.
func TestTheCRDsRefuseInvalidObjects(t *testing.T) {
	check := admit(t)
	object := func(text string) *unstructured.Unstructured {
		o := &unstructured.Unstructured{}
		inJSON, err := yaml.YAMLToJSON([]byte(text))
		if err == nil {
			err = utiljson.Unmarshal(inJSON, &o.Object)
		}
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	const gateway = "{apiVersion: gateway.networking.k8s.io/v1, kind: Gateway, metadata: {name: g}, spec: {gatewayClassName: c, listeners: "
	good := object(gateway + "[{name: a, port: 80, protocol: TCP}]}}")
	if err := check(nil, good); err != nil {
		t.Errorf("a valid Gateway is refused: %v", err)
	}
	from, _, _ := unstructured.NestedSlice(good.Object, "spec", "listeners")
	if got := fmt.Sprint(from); !strings.Contains(got, "from:Same") {
		t.Errorf("listeners are %s, want the default from: Same", got)
	}
	for text, want := range map[string]string{
		"[{name: a, port: 80, protocol: TCP, hostname: example.org}]}}":                                     "hostname must not be specified",
		"[{name: a, port: 80, protocol: TCP}, {name: b, port: 80, protocol: TCP}]}}":                        "must be unique",
		"[{name: a, port: 0, protocol: TCP}]}}":                                                             "spec.listeners[0].port",
		"[{name: a, port: 80, protocol: TCP}]}, status: {conditions: [{type: Accepted, status: Perhaps}]}}": "status.conditions[0].status",
	} {
		if err := check(nil, object(gateway+text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", text, err, want)
		}
	}
}
