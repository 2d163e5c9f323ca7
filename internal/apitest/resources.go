package apitest

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Resource is a kind of objects that a Server has.
type Resource struct {
	schema.GroupVersionKind
	// Name is the name in paths, such as "services".
	Name string
}

// builtin are the resources that every Server has.
func builtin() []Resource {
	return []Resource{
		{v1.SchemeGroupVersion.WithKind("Service"), "services"},
		{v1.SchemeGroupVersion.WithKind("Node"), "nodes"},
		{v1.SchemeGroupVersion.WithKind("Pod"), "pods"},
		{discovery.SchemeGroupVersion.WithKind("EndpointSlice"), "endpointslices"},
		{networking.SchemeGroupVersion.WithKind("ServiceCIDR"), "servicecidrs"},
		{serviceImports.WithKind("ServiceImport"), "serviceimports"},
	}
}

// serviceImports is the group of the Multi-Cluster Services API (KEP-1645).
var serviceImports = schema.GroupVersion{Group: "multicluster.x-k8s.io", Version: "v1alpha1"} // read-only

// ServiceImport returns a ServiceImport without a spec.
func ServiceImport(namespace, name string) *unstructured.Unstructured {
	i := &unstructured.Unstructured{}
	i.SetGroupVersionKind(serviceImports.WithKind("ServiceImport"))
	i.SetNamespace(namespace)
	i.SetName(name)
	return i
}

// resourceOf returns the resource of an object.
func (s *Server) resourceOf(object runtime.Object) (Resource, bool) {
	kind := object.GetObjectKind().GroupVersionKind() // which is often not set
	if kinds, _, err := s.binary.scheme.ObjectKinds(object); err == nil {
		kind = kinds[0]
	}
	i := slices.IndexFunc(s.resources, func(r Resource) bool { return r.GroupVersionKind == kind })
	if i < 0 {
		return Resource{}, false
	}
	return s.resources[i], true
}

// target is what a path names: a resource, and perhaps a namespace, an object and its subresource.
type target struct {
	Resource
	namespace, name, sub string
}

// key is the name of the object in the store.
func (t target) key() string { return t.namespace + "/" + t.name }

func (t target) groupResource() schema.GroupResource {
	return schema.GroupResource{Group: t.Group, Resource: t.Name}
}

// splitPath parses "/api/v1/…" and "/apis/GROUP/VERSION/…". The target has no kind.
func splitPath(path string) (t target, ok bool) {
	segments := strings.Split(strings.TrimPrefix(path, "/"), "/")
	switch {
	case len(segments) > 2 && segments[0] == "api":
		t.Version, segments = segments[1], segments[2:]
	case len(segments) > 3 && segments[0] == "apis":
		t.Group, t.Version, segments = segments[1], segments[2], segments[3:]
	default:
		return t, false
	}
	if segments[0] == "namespaces" && len(segments) > 2 {
		t.namespace, segments = segments[1], segments[2:]
	}
	for i, part := range []*string{&t.Name, &t.name, &t.sub} {
		if i < len(segments) {
			*part = segments[i]
		}
	}
	return t, len(segments) <= 3
}

// parsePath returns what a path names, if the server has it.
func (s *Server) parsePath(path string) (t target, ok bool) {
	t, ok = splitPath(path)
	i := slices.IndexFunc(s.resources, func(r Resource) bool { return r.GroupVersion() == t.GroupVersion() && r.Name == t.Name })
	if !ok || i < 0 {
		return t, false
	}
	t.Resource = s.resources[i]
	return t, t.sub == "" || t.sub == "status"
}
