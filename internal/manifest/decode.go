package manifest

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// mostFaults bounds the errors of one object.
const mostFaults = 10

// decode fills into, and returns the errors in the order of their lines. It accepts
// what sigs.k8s.io/json accepts with strict errors. That package reports neither lines
// nor which item of a list is wrong, and only the first value of a wrong type.
func decode(n *yaml.Node, into Value) []*Error {
	var d decoder
	d.value(n, reflect.ValueOf(into).Elem(), place{line: n.Line})
	slices.SortStableFunc(d.faults, func(a, b *Error) int { return a.Line - b.Line })
	return d.faults
}

type decoder struct{ faults []*Error }

// place is where a value is. The line is that of its name, if it has one.
type place struct {
	line int
	path string // such as ".spec.ports[1]"
}

func (d *decoder) fail(at place, err error) {
	if len(d.faults) < mostFaults {
		d.faults = append(d.faults, newError(at.line, fmt.Errorf("%s: %w", strings.TrimPrefix(at.path, "."), err)))
	}
}

// value walks through a node and a Go value together. Scalars, types that decode
// themselves, and nodes of the wrong kind are left to encoding/json.
func (d *decoder) value(n *yaml.Node, v reflect.Value, at place) {
	n = resolve(n)
	if isNull(n) {
		return
	}
	_, decodesItself := reflect.TypeAssert[json.Unmarshaler](v.Addr())
	switch kind := v.Kind(); {
	case decodesItself:
		d.json(n, v, at)
	case kind == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, v.Elem(), at)
	case kind == reflect.Struct && n.Kind == yaml.MappingNode, kind == reflect.Map && n.Kind == yaml.MappingNode:
		d.mapping(n, v, at)
	case kind == reflect.Slice && n.Kind == yaml.SequenceNode:
		v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
		for i, item := range n.Content {
			d.value(item, v.Index(i), place{item.Line, fmt.Sprintf("%s[%d]", at.path, i)})
		}
	default:
		d.json(n, v, at)
	}
}

// mapping fills a struct or a map.
func (d *decoder) mapping(n *yaml.Node, v reflect.Value, at place) {
	if v.Kind() == reflect.Map {
		v.Set(reflect.MakeMap(v.Type()))
	}
	seen := map[string]bool{}
	for _, p := range pairs(n) {
		below := place{p.name.Line, at.path + "." + p.name.Value}
		if seen[p.name.Value] {
			d.fail(below, errors.New("duplicate field"))
			continue
		}
		seen[p.name.Value] = true
		if v.Kind() == reflect.Map {
			element := reflect.New(v.Type().Elem()).Elem()
			d.value(p.value, element, below)
			v.SetMapIndex(reflect.ValueOf(p.name.Value).Convert(v.Type().Key()), element)
		} else if f, ok := field(v, p.name.Value); ok {
			d.value(p.value, f, below)
		} else {
			d.fail(below, errors.New("unknown field"))
		}
	}
}

// field returns the field of a struct that has a name in JSON.
func field(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if tag == name && name != "" && name != "-" {
			return v.Field(i), true
		}
		if f.Anonymous && tag == "" {
			if inner, ok := field(v.Field(i), name); ok {
				return inner, true
			}
		}
	}
	return reflect.Value{}, false
}

// json fills v with the help of encoding/json.
func (d *decoder) json(n *yaml.Node, v reflect.Value, at place) {
	text, err := toJSON(n)
	if err == nil {
		err = json.Unmarshal(text, v.Addr().Interface())
	}
	if wrongType, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		err = fmt.Errorf("want %s, got %s", wanted(wrongType.Type), got(wrongType.Value))
	}
	if err != nil {
		d.fail(at, err)
	}
}

// got describes the value that is written instead.
func got(what string) string {
	words := map[string]string{"object": "a mapping", "array": "a list", "bool": "true or false", "string": "a string", "number": "a number"}
	return cmp.Or(words[what], what) // a number may have its value
}

// wanted describes the values of a Go type.
func wanted(t reflect.Type) string {
	words := map[reflect.Kind]string{
		reflect.Struct: "a mapping", reflect.Map: "a mapping", reflect.Slice: "a list", reflect.Array: "a list",
		reflect.String: "a string", reflect.Bool: "true or false",
	}
	return cmp.Or(words[t.Kind()], "a number ("+t.Kind().String()+")")
}
