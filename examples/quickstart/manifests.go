package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// objects is what a cluster's API server would hand out.
type objects struct {
	services []*v1.Service
	slices   []*discovery.EndpointSlice
}

// load reads all YAML files of a directory. It reports everything that is wrong,
// with file and document.
func load(source fs.FS) (objects, error) {
	files, err := fs.Glob(source, "*.y*ml")
	if err != nil {
		return objects{}, fmt.Errorf("list manifests: %w", err)
	}
	if len(files) == 0 {
		return objects{}, errors.New("no YAML files found")
	}
	var all objects
	var errs []error
	for _, file := range files {
		text, err := fs.ReadFile(source, file)
		if err != nil {
			errs = append(errs, fmt.Errorf("read manifest: %w", err))
			continue
		}
		for i, document := range bytes.Split(append([]byte("\n"), text...), []byte("\n---")) {
			if err := all.add(document); err != nil {
				errs = append(errs, fmt.Errorf("%s, document %d: %w", file, i+1, err))
			}
		}
	}
	return all, errors.Join(errs...)
}

// add decodes one document. One without content is none.
func (o *objects) add(document []byte) error {
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(document, &kind); err != nil {
		return err
	}
	switch kind.APIVersion + "/" + kind.Kind {
	case "/":
		return nil
	case "v1/Service":
		var s v1.Service
		if err := yaml.UnmarshalStrict(document, &s); err != nil {
			return err
		}
		complete(&s)
		o.services = append(o.services, &s)
	case "discovery.k8s.io/v1/EndpointSlice":
		var s discovery.EndpointSlice
		if err := yaml.UnmarshalStrict(document, &s); err != nil {
			return err
		}
		o.slices = append(o.slices, &s)
	default:
		return fmt.Errorf("apiVersion %q, kind %q: want a v1 Service or a discovery.k8s.io/v1 EndpointSlice",
			kind.APIVersion, kind.Kind)
	}
	return nil
}

// complete fills in what the API server would.
func complete(s *v1.Service) {
	if len(s.Spec.ClusterIPs) == 0 && s.Spec.ClusterIP != "" {
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	}
	if len(s.Spec.IPFamilies) == 0 {
		for _, ip := range s.Spec.ClusterIPs {
			family := v1.IPv4Protocol
			if strings.Contains(ip, ":") {
				family = v1.IPv6Protocol
			}
			s.Spec.IPFamilies = append(s.Spec.IPFamilies, family)
		}
	}
	for i := range s.Spec.Ports {
		s.Spec.Ports[i].Protocol = cmp.Or(s.Spec.Ports[i].Protocol, v1.ProtocolTCP)
	}
}

// feed hands the objects to a proxy, as informers would.
func (o objects) feed(p provider) {
	for _, service := range o.services {
		p.OnServiceAdd(service)
	}
	for _, slice := range o.slices {
		p.OnEndpointSliceAdd(slice)
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
}
