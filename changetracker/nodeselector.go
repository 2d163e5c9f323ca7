package changetracker

import (
	"fmt"

	"k8s.io/apimachinery/pkg/labels"
)

// NodeSelector selects nodes by their labels, in the text form of Kubernetes' label selectors, such as
// "pool in (edge, border), !spare". The empty one selects all nodes, one that cannot be parsed none.
type NodeSelector string

// longestSelector bounds the time of Matches.
const longestSelector = 1024

// ParseNodeSelector checks a selector, and brings it into a canonical form.
func ParseNodeSelector(text string) (NodeSelector, error) {
	if len(text) > longestSelector {
		return "", fmt.Errorf("the selector has %d bytes: want %d at most", len(text), longestSelector)
	}
	selector, err := labels.Parse(text)
	if err != nil {
		return "", err
	}
	return NodeSelector(selector.String()), nil
}

// Matches reports whether a node has the labels.
func (s NodeSelector) Matches(node *Node) bool {
	if s == "" {
		return true
	}
	selector, err := labels.Parse(string(s))
	return err == nil && selector.Matches(labels.Set(node.Labels))
}
