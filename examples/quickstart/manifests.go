package main

import (
	"errors"
	"fmt"
	"io/fs"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/internal/manifest"
)

// objects holds the objects of a cluster.
type objects struct {
	services []*v1.Service
	slices   []*discovery.EndpointSlice
}

// load reads all manifests of a directory. It returns all errors, with file and line.
func load(source fs.FS) (objects, error) {
	files, err := fs.ReadDir(source, ".")
	if err != nil {
		return objects{}, fmt.Errorf("list manifests: %w", err)
	}
	var all objects
	var errs []error
	read := 0
	for _, file := range files {
		if !manifest.IsName(file.Name()) {
			continue
		}
		read++
		if err := all.read(source, file.Name()); err != nil {
			errs = append(errs, err)
		}
	}
	if read == 0 {
		return objects{}, errors.New("no YAML or JSON files found")
	}
	return all, errors.Join(errs...)
}

func (o *objects) read(source fs.FS, file string) error {
	text, err := fs.ReadFile(source, file)
	if err != nil {
		return fmt.Errorf("read manifest: %w", err)
	}
	read, faults := manifest.Parse(file, text)
	for _, object := range read {
		o.add(object.Value)
	}
	var errs []error
	for _, fault := range faults {
		errs = append(errs, fault)
	}
	return errors.Join(errs...)
}

// add adds a Service or an EndpointSlice. Nodes are ignored: the cluster has its own.
func (o *objects) add(value manifest.Value) {
	switch object := value.(type) {
	case *v1.Service:
		o.services = append(o.services, object)
	case *discovery.EndpointSlice:
		o.slices = append(o.slices, object)
	}
}

// feed passes the objects to a proxy, like informers.
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
