// Package manifests reads Services and EndpointSlices from files, for examples that need no API server.
package manifests

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"sigs.k8s.io/yaml"
)

// Objects are the objects of a folder, with the API server's defaults that a proxy needs.
type Objects struct {
	Services []*v1.Service
	Slices   []*discovery.EndpointSlice
}

// Read reads the YAML and JSON files of a folder, except hidden files. Nodes are ignored. The error is about all
// files, and names the file and the first line of each object that is wrong.
func Read(folder fs.FS) (all Objects, err error) {
	entries, err := fs.ReadDir(folder, ".")
	if err != nil {
		return Objects{}, fmt.Errorf("list manifests: %w", err)
	}
	var errs []error
	found := false
	for _, entry := range entries {
		name := entry.Name()
		if strings.HasPrefix(name, ".") || !slices.Contains([]string{".yaml", ".yml", ".json"}, path.Ext(name)) {
			continue
		}
		found = true
		errs = append(errs, all.file(folder, name))
	}
	if !found {
		return Objects{}, errors.New("no manifests: no YAML or JSON files found, want files of Services and EndpointSlices, *.yaml, *.yml or *.json")
	}
	return all, errors.Join(errs...)
}

// file reads one file. A FIFO would block.
func (o *Objects) file(folder fs.FS, name string) error {
	info, err := fs.Stat(folder, name)
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	text, err := fs.ReadFile(folder, name)
	if err != nil {
		return fmt.Errorf("read manifest: %w", err)
	}
	var errs []error
	line := 0 // of the separator before the document
	for document := range strings.SplitSeq("\n"+string(text), "\n---") {
		content := strings.TrimLeft(document, " \t\r\n")
		first := line + strings.Count(document[:len(document)-len(content)], "\n")
		if err := o.document(strings.Repeat("\n", max(first-1, 0)) + content); err != nil { // the YAML package counts lines, too
			errs = append(errs, fmt.Errorf("%s:%d: %w", name, first, err))
		}
		line += strings.Count(document, "\n") + 1
	}
	return errors.Join(errs...)
}

func (o *Objects) document(text string) error {
	object, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil || string(object) == "null" { // only comments
		return err
	}
	return o.add(object)
}

// add adds an object, or the objects of a List.
func (o *Objects) add(text []byte) error {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(v1.SchemeGroupVersion, &v1.Service{}, &v1.Node{}, &metav1.List{})
	scheme.AddKnownTypes(discovery.SchemeGroupVersion, &discovery.EndpointSlice{})
	object, kind, err := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer().Decode(text, nil, nil)
	if runtime.IsNotRegisteredError(err) {
		err = fmt.Errorf("apiVersion %q, kind %q: want a v1 Service, a discovery.k8s.io/v1 EndpointSlice, a v1 Node or a v1 List of them", kind.GroupVersion(), kind.Kind)
	}
	if o, isObject := object.(metav1.Object); err == nil && isObject && o.GetName() == "" {
		err = errors.New("metadata.name is missing")
	}
	if err != nil {
		return err
	}
	var errs []error
	switch object := object.(type) {
	case *v1.Service:
		setDefaults(object)
		o.Services = append(o.Services, object)
	case *discovery.EndpointSlice:
		object.Namespace = cmp.Or(object.Namespace, metav1.NamespaceDefault)
		for i := range object.Ports {
			object.Ports[i].Name = cmp.Or(object.Ports[i].Name, new(""))
		}
		o.Slices = append(o.Slices, object)
	case *metav1.List:
		for _, item := range object.Items {
			errs = append(errs, o.add(item.Raw))
		}
	}
	return errors.Join(errs...)
}

// setDefaults completes a Service that no API server has seen. It allocates no cluster IPs and no node ports.
func setDefaults(s *v1.Service) {
	s.Namespace = cmp.Or(s.Namespace, metav1.NamespaceDefault)
	spec := &s.Spec
	if len(spec.ClusterIPs) == 0 && spec.ClusterIP != "" {
		spec.ClusterIPs = []string{spec.ClusterIP}
	}
	for i, ip := range spec.ClusterIPs {
		spec.ClusterIP = cmp.Or(spec.ClusterIP, ip)
		if len(spec.IPFamilies) == i && ip != v1.ClusterIPNone {
			spec.IPFamilies = append(spec.IPFamilies, v1.IPv4Protocol)
			if strings.Contains(ip, ":") {
				spec.IPFamilies[i] = v1.IPv6Protocol
			}
		}
	}
	for i := range spec.Ports {
		spec.Ports[i].Protocol = cmp.Or(spec.Ports[i].Protocol, v1.ProtocolTCP)
	}
}
