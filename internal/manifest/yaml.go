package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// mostAliased bounds what the aliases of a file may blow it up by.
const mostAliased = 1 << 16

// readYAML reads the documents of a file, as far as it is YAML.
func readYAML(text []byte) ([]*value, *fault) {
	var documents []*value
	builder := builder{left: mostAliased, open: map[*yaml.Node]bool{}}
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return documents, yamlFault(err, text)
		}
		v, f := builder.value(&document)
		if f != nil {
			return documents, f
		}
		documents = append(documents, v)
	}
}

// builder turns YAML nodes into values.
type builder struct {
	left    int                 // values that aliases may still stand for
	aliases int                 // that we are inside of
	open    map[*yaml.Node]bool // what an alias must not stand for: it would hold itself
}

func (b *builder) value(n *yaml.Node) (*value, *fault) {
	if b.aliases > 0 {
		if b.left--; b.left < 0 {
			return nil, &fault{n.Line, fmt.Errorf("aliases stand for more than %d values", mostAliased)}
		}
	}
	switch n.Kind {
	case yaml.DocumentNode:
		return b.value(n.Content[0])
	case yaml.AliasNode:
		if b.open[n.Alias] {
			return nil, &fault{n.Line, fmt.Errorf("alias %q stands for what it is in", n.Value)}
		}
		b.aliases++
		defer func() { b.aliases-- }()
		return b.value(n.Alias)
	case yaml.MappingNode:
		return b.within(n, b.mapping)
	case yaml.SequenceNode:
		return b.within(n, b.list)
	case yaml.ScalarNode:
		return b.scalar(n)
	default: // an empty document
		return &value{kind: scalar, line: max(n.Line, 1), text: []byte("null")}, nil
	}
}

// within keeps aliases inside a node from standing for the node.
func (b *builder) within(n *yaml.Node, build func(*yaml.Node) (*value, *fault)) (*value, *fault) {
	b.open[n] = true
	defer delete(b.open, n)
	return build(n)
}

func (b *builder) list(n *yaml.Node) (*value, *fault) {
	v := &value{kind: list, line: n.Line}
	for _, item := range n.Content {
		child, f := b.value(item)
		if f != nil {
			return nil, f
		}
		v.children = append(v.children, child)
	}
	return v, nil
}

// mapping reads the pairs of a mapping. Those of "<<" come last, and only if no
// other pair has their name.
func (b *builder) mapping(n *yaml.Node) (*value, *fault) {
	v := &value{kind: mapping, line: n.Line}
	var merged []*value
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		child, f := b.value(n.Content[i+1])
		if f != nil {
			return nil, f
		}
		if key.ShortTag() == "!!merge" {
			merged = append(merged, child)
			continue
		}
		text, f := keyText(key)
		if f != nil {
			return nil, f
		}
		v.names, v.children = append(v.names, name{text, key.Line}), append(v.children, child)
	}
	for _, m := range merged {
		if f := v.merge(m); f != nil {
			return nil, f
		}
	}
	return v, nil
}

// merge adds the pairs of a mapping, or of a list of mappings.
func (v *value) merge(m *value) *fault {
	switch m.kind {
	case list:
		for _, item := range m.children {
			if f := v.merge(item); f != nil {
				return f
			}
		}
	case mapping:
		for i, n := range m.names {
			if v.child(n.text) == nil {
				v.names, v.children = append(v.names, n), append(v.children, m.children[i])
			}
		}
	case scalar:
		return &fault{m.line, errors.New(`"<<" wants a mapping or a list of mappings`)}
	}
	return nil
}

func keyText(key *yaml.Node) (string, *fault) {
	if key.Kind == yaml.AliasNode {
		key = key.Alias
	}
	if key.Kind != yaml.ScalarNode {
		return "", &fault{key.Line, errors.New("the name of a field must be a string")}
	}
	return key.Value, nil
}

// scalar reads one as kubectl does, which follows YAML 1.1: plain words such as
// "yes" are booleans, and a date is a string.
func (b *builder) scalar(n *yaml.Node) (*value, *fault) {
	v := &value{kind: scalar, line: n.Line}
	var content any
	var err error
	switch tag := n.ShortTag(); {
	case tag == "!!timestamp", tag == "!!merge":
		content = n.Value
	case tag == "!!str" && n.Style == 0:
		content = plain(n.Value)
	default:
		err = n.Decode(&content)
	}
	if err == nil {
		v.text, err = json.Marshal(content)
	}
	if err != nil {
		return nil, &fault{n.Line, fmt.Errorf("read %q: %s", n.Value, strings.TrimPrefix(err.Error(), "yaml: "))}
	}
	return v, nil
}

// plain is what YAML 1.1 takes an unquoted word for.
func plain(word string) any {
	switch word {
	case "y", "Y", "yes", "Yes", "YES", "on", "On", "ON":
		return true
	case "n", "N", "no", "No", "NO", "off", "Off", "OFF":
		return false
	default:
		return word
	}
}

// yamlFault finds the line of a syntax error.
func yamlFault(err error, text []byte) *fault {
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	line := 1 // the YAML package does not name the first line
	if m := regexp.MustCompile(`^line (\d+): `).FindStringSubmatch(message); m != nil {
		message = message[len(m[0]):]
		line, _ = strconv.Atoi(m[1])
		if fromParser(message) {
			line++ // the YAML package counts these from 0
		}
	} else if i := culprit(message, text); i >= 0 {
		line = lineAt(text, i)
	}
	return &fault{line, errors.New(message)}
}

// fromParser tells the errors of the YAML package's parser from its scanner's.
func fromParser(message string) bool {
	for _, end := range []string{"<document start>", "node content", "'-' indicator", "key", "',' or ']'", "',' or '}'"} {
		if message == "did not find expected "+end {
			return true
		}
	}
	return false
}

// culprit finds what the YAML package complains of without naming a line: bytes
// that cannot be in a text, or an alias for nothing.
func culprit(message string, text []byte) int {
	var anchor string
	if n, _ := fmt.Sscanf(message, "unknown anchor '%s referenced", &anchor); n == 1 {
		return bytes.Index(text, []byte("*"+strings.TrimSuffix(anchor, "'")))
	}
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRune(text[i:])
		if r == utf8.RuneError && size == 1 || r < ' ' && !strings.ContainsRune("\t\n\r", r) || r == 0x7f {
			return i
		}
		i += size
	}
	return -1
}

// lineAt is the line of a byte.
func lineAt(text []byte, offset int) int {
	return 1 + bytes.Count(text[:offset], []byte("\n"))
}

// clamp keeps a line within the text: the end of a file may count as one more.
func clamp(line int, text []byte) int {
	text = bytes.TrimRight(text, "\n")
	return max(1, min(line, lineAt(text, len(text))))
}
