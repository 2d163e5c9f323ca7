package iptables

// The tables that the engine uses.
const (
	tableNAT    = "nat"
	tableFilter = "filter"
)

// builtInChains are the chains of the kernel, in the order of its hooks.
var builtInChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} // read-only

// ruleset holds the rules of chains by name. An empty slice is a chain without rules;
// where changes are meant, nil is a deleted chain.
type ruleset map[string][]rule

func (s ruleset) count() (rules int) {
	for _, chain := range s {
		rules += len(chain)
	}
	return rules
}

// notNil makes nil an empty chain.
func notNil(rules []rule) []rule {
	if rules == nil {
		return []rule{}
	}
	return rules
}

// chainID names a chain of a table.
type chainID struct{ table, chain string }

// jump is a rule of another chain that jumps to a chain of the instance.
type jump struct {
	chain, to string
	rule      rule
}
