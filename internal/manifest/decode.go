package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sort"
	"strings"

	strict "sigs.k8s.io/json"
)

// fault is what is wrong in one line.
type fault struct {
	line int
	err  error
}

// mostFaults bounds what is said about one object.
const mostFaults = 10

// decode fills into, and returns what is wrong with the value. Neither the JSON
// decoder's offsets nor its paths tell the place of every fault, so it is found by
// trying: what is left without the guilty part can be decoded.
func decode(v *value, into Value) []fault {
	err := tryDecode(v, into)
	if err == nil {
		return nil
	}
	blank := reflect.TypeOf(into).Elem()
	try := func(v *value) error { return tryDecode(v, reflect.New(blank).Interface()) }
	var faults []fault
	for ; err != nil && len(faults) < mostFaults; err = try(v) {
		var f fault
		f, v = blame(v, try)
		faults = append(faults, f)
	}
	sort.SliceStable(faults, func(i, j int) bool { return faults[i].line < faults[j].line })
	return faults
}

// tryDecode returns the first thing that is wrong.
func tryDecode(v *value, into any) error {
	faults, err := strict.UnmarshalStrict(v.json(), into)
	if err != nil {
		return err
	}
	if len(faults) > 0 {
		return faults[0]
	}
	return nil
}

// blame finds the first part of a mapping that cannot be decoded, and returns what
// is wrong with it and the mapping without it. The name of the path's last part
// is where the fault is: its value may be fine, and only the name unknown.
func blame(v *value, try func(*value) error) (fault, *value) {
	i := sort.Search(len(v.children), func(n int) bool { return try(v.first(n+1)) != nil })
	if i == len(v.children) { // no part is guilty, only the whole: no way on
		return fault{v.line, describe("", try(v))}, v.first(0)
	}
	path := v.step(i)
	line := v.lineOf(i)
	guilty := v.children[i]
	in := func(part *value) error { return try(v.first(i+1).with(i, part)) }
	if guilty.kind == scalar || in(guilty.first(0)) != nil {
		return fault{line, describe(path, in(guilty))}, v.without(i)
	}
	f, rest := blame(guilty, in)
	f.err = deeper(path, f.err)
	return f, v.with(i, rest)
}

// pathError is a fault at a path.
type pathError struct {
	path string
	err  error
}

func (e *pathError) Error() string { return strings.TrimPrefix(e.path, ".") + ": " + e.err.Error() }

func (e *pathError) Unwrap() error { return e.err }

// deeper puts a step before the path of an error.
func deeper(step string, err error) error {
	if e, ok := errors.AsType[*pathError](err); ok {
		return &pathError{step + e.path, e.err}
	}
	return err
}

// describe puts a decoder's error in the words of whoever wrote the file.
func describe(path string, err error) error {
	if wrongType, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return &pathError{path, fmt.Errorf("want %s, got %s", wanted(wrongType.Type), got(wrongType.Value))}
	}
	for _, what := range []string{"unknown field", "duplicate field"} {
		if strings.HasPrefix(err.Error(), what) { // the path follows
			return &pathError{path, errors.New(what)}
		}
	}
	return &pathError{path, err}
}

// got says what is written instead.
func got(what string) string {
	switch what {
	case "object":
		return "a mapping"
	case "array":
		return "a list"
	case "bool":
		return "true or false"
	case "string", "number":
		return "a " + what
	default: // a number, with its value
		return what
	}
}

// wanted says what to write for a Go type.
func wanted(t reflect.Type) string {
	words := map[reflect.Kind]string{
		reflect.Struct: "a mapping", reflect.Map: "a mapping", reflect.Slice: "a list", reflect.Array: "a list",
		reflect.String: "a string", reflect.Bool: "true or false",
	}
	if word := words[t.Kind()]; word != "" {
		return word
	}
	return "a number (" + t.Kind().String() + ")"
}
