// Package manifest reads Services, EndpointSlices and Nodes from files, as strictly
// as an API server would, and says in which line of which file something is wrong.
package manifest

import (
	"errors"
	"fmt"
	"path"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ErrKind is in the Errors of objects that are none of ours. They say nothing
// about the rest of the file.
var ErrKind = errors.New("want a v1 Service, a discovery.k8s.io/v1 EndpointSlice, a v1 Node or a v1 List of them")

// Value is a *v1.Service, a *discovery.EndpointSlice or a *v1.Node.
type Value interface {
	runtime.Object
	metav1.Object
}

// Object is one object of a file.
type Object struct {
	Value Value
	// Line is where the object begins, from 1.
	Line int
}

// Error says what is wrong with a file, and where.
type Error struct {
	File string
	Line int // from 1
	Err  error
}

// Error is "file:line: cause".
func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %v", e.File, e.Line, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// IsName says whether a file of that name holds manifests.
func IsName(file string) bool {
	return slices.Contains([]string{".yaml", ".yml", ".json"}, path.Ext(file))
}

// Parse reads a file of YAML documents, or of JSON if its name says so. It returns
// every object that can be read, completed by what an API server would fill in,
// and everything that is wrong, both in the order of the file.
func Parse(file string, text []byte) ([]Object, []*Error) {
	p := &parser{file: file}
	read := readYAML
	if path.Ext(file) == ".json" {
		read = readJSON
	}
	documents, err := read(text)
	for _, document := range documents {
		p.object(document)
	}
	if err != nil {
		p.errs = append(p.errs, &Error{file, clamp(err.line, text), err.err})
	}
	return p.objects, p.errs
}

// parser collects what is in one file.
type parser struct {
	file    string
	objects []Object
	errs    []*Error
}

func (p *parser) fail(line int, format string, args ...any) {
	p.errs = append(p.errs, &Error{p.file, line, fmt.Errorf(format, args...)})
}

// object reads one object, or those of a List. Nothing and null are none.
func (p *parser) object(v *value) {
	if v.kind == scalar && string(v.text) == "null" {
		return
	}
	if v.kind != mapping {
		p.fail(v.line, "want an object with apiVersion and kind, got a %s", v.kind)
		return
	}
	apiVersion, kind := v.textOf("apiVersion"), v.textOf("kind")
	switch apiVersion + " " + kind {
	case "v1 Service":
		p.decode(v, &v1.Service{})
	case "discovery.k8s.io/v1 EndpointSlice":
		p.decode(v, &discovery.EndpointSlice{})
	case "v1 Node":
		p.decode(v, &v1.Node{})
	case "v1 List":
		p.list(v)
	default:
		if apiVersion == "" || kind == "" {
			p.fail(v.line, "want an object with apiVersion and kind, got apiVersion %q and kind %q", apiVersion, kind)
			return
		}
		p.fail(v.line, "apiVersion %q, kind %q: %w", apiVersion, kind, ErrKind)
	}
}

func (p *parser) list(v *value) {
	items := v.child("items")
	if items == nil {
		return
	}
	if items.kind != list {
		p.fail(items.line, "items: want a list, got a %s", items.kind)
		return
	}
	for _, item := range items.children {
		p.object(item)
	}
}

func (p *parser) decode(v *value, into Value) {
	faults := decode(v, into)
	for _, f := range faults {
		p.errs = append(p.errs, &Error{p.file, f.line, f.err})
	}
	if len(faults) > 0 {
		return
	}
	if into.GetName() == "" {
		p.fail(v.line, "metadata.name is missing")
		return
	}
	complete(into)
	p.objects = append(p.objects, Object{into, v.line})
}
