package changetracker

// maxNodeNames bounds the table of node names, because nodes come and go without end.
const maxNodeNames = 1 << 14

// nodeNames holds the name of each node once. Every endpoint of an API object brings its own
// copy, and Select compares the names of all endpoints of a service port, which is several
// times as fast if equal names share memory.
type nodeNames map[string]string

// share makes the endpoints, which the caller owns, refer to the stored names.
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
