package changetracker

// maxPlaceNames bounds the table of names, because nodes come and go without end.
const maxPlaceNames = 1 << 14

// placeNames holds the name of each node and zone once. Every endpoint of an API object brings its
// own copies, and Select compares the names of all endpoints of a service port, which is several
// times as fast if equal names share memory.
type placeNames map[string]string

// share makes the endpoints, which the caller owns, refer to the stored names.
func (n placeNames) share(list []Endpoint) {
	for i := range list {
		list[i].Node, list[i].Zone = n.held(list[i].Node), n.held(list[i].Zone)
	}
}

func (n placeNames) held(name string) string {
	if name == "" {
		return ""
	}
	held, ok := n[name]
	if !ok {
		if len(n) >= maxPlaceNames {
			clear(n)
		}
		held = name
		n[name] = name
	}
	return held
}
