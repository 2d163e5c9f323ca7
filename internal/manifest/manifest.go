// Package manifest reads Services, EndpointSlices and Nodes from files, as strictly as
// an API server. Its errors name the file and the line.
package manifest

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"go.yaml.in/yaml/v3"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ErrKind is wrapped by the Errors of objects of other kinds. The file's other objects
// are read.
var ErrKind = errors.New("want a v1 Service, a discovery.k8s.io/v1 EndpointSlice, a v1 Node or a v1 List of them")

// Value is a *v1.Service, a *discovery.EndpointSlice or a *v1.Node.
type Value interface {
	runtime.Object
	metav1.Object
}

// Object is one object of a file.
type Object struct {
	Value Value
	// Line is the first line of the object, counted from 1.
	Line int
}

// Error is an error in one line of a file.
type Error struct {
	File string
	Line int // counted from 1
	Err  error
}

// newError returns an Error to which Parse adds the file.
func newError(line int, err error) *Error { return &Error{Line: line, Err: err} }

// Error is "file:line: cause".
func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %v", e.File, e.Line, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// IsName reports whether a file of that name contains manifests.
func IsName(file string) bool {
	return slices.Contains([]string{".yaml", ".yml", ".json"}, path.Ext(file))
}

// Parse reads a file of YAML documents, or of JSON if its name ends in .json. It returns
// the valid objects, with an API server's defaults, and the errors, both in the order of
// the file.
func Parse(file string, text []byte) ([]Object, []*Error) {
	p := &parser{}
	read := readYAML
	if path.Ext(file) == ".json" {
		read = readJSON
	}
	documents, err := read(text)
	for _, document := range documents {
		p.object(document)
	}
	if err != nil {
		err.Line = clamp(err.Line, text)
		p.errs = append(p.errs, err)
	}
	for _, err := range p.errs {
		err.File = file
	}
	return p.objects, p.errs
}

// parser collects the objects and errors of one file.
type parser struct {
	objects []Object
	errs    []*Error
}

func (p *parser) fail(line int, format string, args ...any) {
	p.errs = append(p.errs, newError(line, fmt.Errorf(format, args...)))
}

// object reads one object, or those of a List.
func (p *parser) object(n *yaml.Node) {
	n = resolve(n)
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		p.fail(n.Line, "want an object with apiVersion and kind, got a %s", kindOf(n))
		return
	}
	fields := pairs(n)
	apiVersion, kind := text(child(fields, "apiVersion")), text(child(fields, "kind"))
	switch apiVersion + " " + kind {
	case "v1 Service":
		p.decode(n, &v1.Service{})
	case "discovery.k8s.io/v1 EndpointSlice":
		p.decode(n, &discovery.EndpointSlice{})
	case "v1 Node":
		p.decode(n, &v1.Node{})
	case "v1 List":
		p.list(child(fields, "items"))
	default:
		if apiVersion == "" || kind == "" {
			p.fail(n.Line, "want an object with apiVersion and kind, got apiVersion %q and kind %q", apiVersion, kind)
			return
		}
		p.fail(n.Line, "apiVersion %q, kind %q: %w", apiVersion, kind, ErrKind)
	}
}

// text returns the value of a string, "" for any other node.
func text(n *yaml.Node) string {
	if n == nil || n.ShortTag() != "!!str" {
		return ""
	}
	return n.Value
}

func (p *parser) list(items *yaml.Node) {
	switch {
	case items == nil:
	case items.Kind != yaml.SequenceNode:
		p.fail(items.Line, "items: want a list, got a %s", kindOf(items))
	default:
		for _, item := range items.Content {
			p.object(item)
		}
	}
}

func (p *parser) decode(n *yaml.Node, into Value) {
	if faults := decode(n, into); len(faults) > 0 {
		p.errs = append(p.errs, faults...)
		return
	}
	if into.GetName() == "" {
		p.fail(n.Line, "metadata.name is missing")
		return
	}
	setDefaults(into)
	p.objects = append(p.objects, Object{into, n.Line})
}
