package changetracker

// maxNodeNames bounds the table of node names, since nodes come and go for ever.
const maxNodeNames = 1 << 14

// nodeNames holds the name of each node once. Every endpoint of an API object brings a
// copy of its own, and Select compares the names of all endpoints of a service port: from
// one place in memory that is several times as fast.
type nodeNames map[string]string

// share makes the endpoints, which the caller owns, refer to the names that are held.
func (n nodeNames) share(list []Endpoint) {
	for i := range list {
		name := list[i].Node
		if name == "" {
			continue
		}
		held, ok := n[name]
		if !ok {
			if len(n) >= maxNodeNames {
				clear(n)
			}
			held = name
			n[name] = name
		}
		list[i].Node = held
	}
}
