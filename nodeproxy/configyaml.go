package nodeproxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// parseYAML parses the only document of a file. A key that is there twice is an error, as nobody
// knows which one was meant.
func parseYAML(path string, text []byte) (document yaml.Node, err error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	if err = decoder.Decode(&document); errors.Is(err, io.EOF) {
		return document, nil
	}
	if err == nil {
		var all any
		err = document.Decode(&all) // refuses what a Node has: duplicates, and aliases that have no end
	}
	if err != nil {
		return document, atLine(path, err)
	}
	var second yaml.Node
	switch err = decoder.Decode(&second); {
	case errors.Is(err, io.EOF):
		return document, nil
	case err != nil:
		return document, atLine(path, err)
	case isNull(second.Content[0]): // after a last line of hyphens
		return document, nil
	}
	return document, fmt.Errorf("%s:%d: a second document begins: want one", path, second.Line)
}

// atLine returns an error of the YAML package as "path:line: what".
func atLine(path string, err error) error {
	texts := []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	if several := (*yaml.TypeError)(nil); errors.As(err, &several) {
		texts = several.Errors
	}
	var errs []error
	for _, text := range texts {
		line := ""
		if at, what, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(at, "line ") {
			line, text = strings.TrimPrefix(at, "line ")+":", what
		}
		errs = append(errs, fmt.Errorf("%s:%s %s", path, line, text))
	}
	return errors.Join(errs...)
}

func isNull(value *yaml.Node) bool { return value.Kind == yaml.ScalarNode && value.Tag == "!!null" }

// behindAlias returns what an alias stands for.
func behindAlias(value *yaml.Node) *yaml.Node {
	for value.Kind == yaml.AliasNode { // parseYAML has refused those without an end
		value = value.Alias
	}
	return value
}

// entry is a key of a mapping with its value.
type entry struct{ key, value *yaml.Node }

// entriesOf returns the entries of a mapping, in their order, and after them what it merges by
// the key "<<" and does not have itself.
func entriesOf(mapping *yaml.Node) (all []entry) {
	var merged []*yaml.Node
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		key, value := behindAlias(mapping.Content[i]), behindAlias(mapping.Content[i+1])
		switch {
		case key.Tag != "!!merge":
			all = append(all, entry{key, value})
		case value.Kind == yaml.SequenceNode:
			merged = append(merged, value.Content...)
		default:
			merged = append(merged, value)
		}
	}
	for _, other := range merged {
		for _, e := range entriesOf(behindAlias(other)) {
			if !slices.ContainsFunc(all, func(own entry) bool { return own.key.Value == e.key.Value }) {
				all = append(all, e)
			}
		}
	}
	return all
}

// truthOf returns true and false as flags have them. YAML 1.1, which kube-proxy reads, has other
// words for them, if they are not in quotes.
func truthOf(value *yaml.Node) string {
	if value.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 {
		switch strings.ToLower(value.Value) {
		case "y", "yes", "on":
			return "true"
		case "n", "no", "off":
			return "false"
		}
	}
	return value.Value
}
