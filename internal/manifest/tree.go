package manifest

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
)

// kind is what JSON knows of kinds.
type kind string

const (
	mapping kind = "mapping"
	list    kind = "list"
	scalar  kind = "scalar"
)

// value is a JSON value that knows its line in the file.
type value struct {
	kind     kind
	line     int
	text     []byte // of a scalar, as JSON
	names    []name // of a mapping, one for each child
	children []*value
}

// name is the key of a child.
type name struct {
	text string
	line int
}

// child returns the first child of that name, nil if there is none.
func (v *value) child(text string) *value {
	i := slices.IndexFunc(v.names, func(n name) bool { return n.text == text })
	if i < 0 {
		return nil
	}
	return v.children[i]
}

// textOf returns the child of that name if it is a string.
func (v *value) textOf(name string) string {
	var text string
	if c := v.child(name); c == nil || c.kind != scalar || json.Unmarshal(c.text, &text) != nil {
		return ""
	}
	return text
}

// first returns a copy with the first n children only.
func (v *value) first(n int) *value {
	short := *v
	short.children = v.children[:n]
	if v.kind == mapping {
		short.names = v.names[:n]
	}
	return &short
}

// with returns a copy with another i-th child.
func (v *value) with(i int, child *value) *value {
	other := *v
	other.children = slices.Clone(v.children)
	other.children[i] = child
	return &other
}

// without returns a copy without the i-th child.
func (v *value) without(i int) *value {
	less := *v
	less.children = slices.Delete(slices.Clone(v.children), i, i+1)
	if v.kind == mapping {
		less.names = slices.Delete(slices.Clone(v.names), i, i+1)
	}
	return &less
}

// lineOf is where the i-th child begins, with its name if it has one.
func (v *value) lineOf(i int) int {
	if v.kind == mapping {
		return v.names[i].line
	}
	return v.children[i].line
}

// step is what leads to the i-th child, in the way of ".spec" and "[0]".
func (v *value) step(i int) string {
	if v.kind == mapping {
		return "." + v.names[i].text
	}
	return "[" + strconv.Itoa(i) + "]"
}

// json writes the value.
func (v *value) json() []byte {
	var out bytes.Buffer
	v.write(&out)
	return out.Bytes()
}

func (v *value) write(out *bytes.Buffer) {
	if v.kind == scalar {
		out.Write(v.text)
		return
	}
	brackets := "[]"
	if v.kind == mapping {
		brackets = "{}"
	}
	out.WriteByte(brackets[0])
	for i, child := range v.children {
		if i > 0 {
			out.WriteByte(',')
		}
		if v.kind == mapping {
			out.Write(quote(v.names[i].text))
			out.WriteByte(':')
		}
		child.write(out)
	}
	out.WriteByte(brackets[1])
}

// quote writes a string as JSON. It cannot fail: bytes that are no text are replaced.
func quote(text string) []byte {
	quoted, _ := json.Marshal(text)
	return quoted
}
