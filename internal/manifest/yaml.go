package manifest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// mostAliased bounds the nodes that the aliases of a file expand to.
const mostAliased = 1 << 16

// readYAML reads the documents of a file up to the first error.
func readYAML(text []byte) ([]*yaml.Node, *Error) {
	var documents []*yaml.Node
	check := checker{sizes: map[*yaml.Node]int{}}
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return documents, yamlFault(err, text)
		}
		for _, n := range document.Content {
			if _, f := check.size(n); f != nil {
				return documents, f
			}
			documents = append(documents, n)
		}
	}
}

// checker refuses documents that are valid YAML but have no equivalent in JSON.
type checker struct {
	sizes   map[*yaml.Node]int // of nodes with an anchor
	aliased int                // sum of the sizes of aliases
}

// size returns the number of nodes after the expansion of aliases.
func (c *checker) size(n *yaml.Node) (int, *Error) {
	if n.Kind == yaml.AliasNode {
		size := c.sizes[n.Alias]
		if size == 0 { // the alias is inside of the node with the anchor
			return 0, newError(n.Line, fmt.Errorf("alias %q refers to a value that contains it", n.Value))
		}
		if c.aliased += size; c.aliased > mostAliased {
			return 0, newError(n.Line, fmt.Errorf("aliases expand to more than %d values", mostAliased))
		}
		return size, nil
	}
	sum := 1
	for i, child := range n.Content {
		size, f := c.size(child)
		if f == nil && n.Kind == yaml.MappingNode && i%2 == 0 {
			f = checkField(child, n.Content[i+1])
		}
		if f != nil {
			return 0, f
		}
		sum += size
	}
	c.sizes[n] = sum
	return sum, nil
}

// checkField refuses names that are not scalars, and values of "<<" that are not mappings.
func checkField(name, value *yaml.Node) *Error {
	if resolve(name).Kind != yaml.ScalarNode {
		return newError(name.Line, errors.New("the name of a field must be a string"))
	}
	if resolve(name).ShortTag() != "!!merge" {
		return nil
	}
	sources := []*yaml.Node{resolve(value)}
	if sources[0].Kind == yaml.SequenceNode {
		sources = sources[0].Content
	}
	for _, source := range sources {
		if resolve(source).Kind != yaml.MappingNode {
			return newError(source.Line, errors.New(`"<<" wants a mapping or a list of mappings`))
		}
	}
	return nil
}

// yamlFault adds the line to a syntax error.
func yamlFault(err error, text []byte) *Error {
	message := strings.TrimPrefix(err.Error(), "yaml: ")
	line := 1 // which the YAML package leaves out
	if m := regexp.MustCompile(`^line (\d+): `).FindStringSubmatch(message); m != nil {
		message = message[len(m[0]):]
		line, _ = strconv.Atoi(m[1])
		if fromParser(message) {
			line++ // the parser counts lines from 0
		}
	} else if i := culprit(message, text); i >= 0 {
		line = lineAt(text, i)
	}
	return newError(line, errors.New(message))
}

// fromParser reports whether an error is from the YAML package's parser, and not from
// its scanner.
func fromParser(message string) bool {
	expected, is := strings.CutPrefix(message, "did not find expected ")
	return is && slices.Contains([]string{"<document start>", "node content", "'-' indicator", "key", "',' or ']'", "',' or '}'"}, expected)
}

// culprit returns the offset of an error that the YAML package reports without a line:
// bytes that are not allowed in YAML, or an alias without an anchor.
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

// lineAt returns the line of a byte.
func lineAt(text []byte, offset int) int {
	return 1 + bytes.Count(text[:offset], []byte("\n"))
}

// clamp keeps a line within the text. The YAML package may report the line after the end.
func clamp(line int, text []byte) int {
	text = bytes.TrimRight(text, "\n")
	return max(1, min(line, lineAt(text, len(text))))
}
