package manifest

import (
	"encoding/json"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// jsonNumber marks numbers of JSON files, which become trees of YAML nodes too. No
// number of YAML has this style.
const jsonNumber = yaml.FlowStyle

func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "mapping"
	case yaml.SequenceNode:
		return "list"
	default:
		return "scalar"
	}
}

// resolve returns the node that an alias stands for.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// isNull reports whether a node is null, or an empty document.
func isNull(n *yaml.Node) bool { return n.Kind == 0 || n.ShortTag() == "!!null" }

// pair is a field of a mapping.
type pair struct{ name, value *yaml.Node }

// pairs returns the fields of a mapping. Those of "<<" come last, and only if no other
// field has their name.
func pairs(n *yaml.Node) []pair {
	var all []pair
	var merged []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := resolve(n.Content[i]), n.Content[i+1]
		if name.ShortTag() == "!!merge" {
			merged = append(merged, value)
		} else {
			all = append(all, pair{name, value})
		}
	}
	for len(merged) > 0 {
		m := resolve(merged[0])
		merged = merged[1:]
		if m.Kind == yaml.SequenceNode {
			merged = append(append([]*yaml.Node{}, m.Content...), merged...)
			continue
		}
		for _, p := range pairs(m) {
			if child(all, p.name.Value) == nil {
				all = append(all, p)
			}
		}
	}
	return all
}

// child returns the value of the first field of that name, nil if there is none.
func child(fields []pair, name string) *yaml.Node {
	for _, p := range fields {
		if p.name.Value == name {
			return resolve(p.value)
		}
	}
	return nil
}

// toJSON reads scalars as kubectl does, which follows YAML 1.1: plain words such as
// "yes" are booleans, and a date is a string.
func toJSON(n *yaml.Node) ([]byte, error) {
	if n.Kind == yaml.ScalarNode && n.Style == jsonNumber { // 1.0 is no integer, unlike in YAML
		return []byte(n.Value), nil
	}
	var content any
	var err error
	switch tag := n.ShortTag(); {
	case n.Kind == yaml.ScalarNode && (tag == "!!timestamp" || tag == "!!merge"):
		content = n.Value
	case n.Kind == yaml.ScalarNode && tag == "!!str" && n.Style == 0:
		content = plain(n.Value)
	default:
		err = n.Decode(&content)
	}
	var text []byte
	if err == nil {
		text, err = json.Marshal(content)
	}
	if err != nil {
		return nil, fmt.Errorf("read %q: %s", n.Value, strings.TrimPrefix(err.Error(), "yaml: "))
	}
	return text, nil
}

// plain is the value of an unquoted word in YAML 1.1.
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
