package debughttp

import (
	"bytes"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// needle is the text of a search for Services.
type needle struct {
	text                    []byte         // in lower case
	mayBeAddress, mayBePort bool           // otherwise addresses or node ports are not compared
	whole                   netip.AddrPort // if the text is an address and a port
	buf                     []byte         // reused for the texts that are compared
}

func newNeedle(text string) *needle {
	text = strings.ToLower(strings.TrimSpace(text))
	n := &needle{text: []byte(text)}
	n.mayBeAddress = strings.Trim(text, "0123456789abcdef:.") == ""
	n.mayBePort = strings.Trim(text, "0123456789") == ""
	if whole, err := netip.ParseAddrPort(text); err == nil {
		n.whole = netip.AddrPortFrom(whole.Addr().Unmap(), whole.Port())
	}
	return n
}

// matches reports whether a service port's name, VIPs, node port or endpoint addresses
// contain the text.
func (n *needle) matches(state *changetracker.State, port *changetracker.ServicePort) bool {
	switch {
	case len(n.text) == 0:
		return true
	case n.inName(port.Name.NamespacedName):
		return true
	case n.mayBePort && port.NodePort != 0 && n.in(strconv.AppendUint(n.buf[:0], uint64(port.NodePort), 10)):
		return true
	case n.whole.IsValid():
		return n.isWhole(state, port)
	case !n.mayBeAddress:
		return false
	}
	if n.inAddress(port.ClusterIP) || slices.ContainsFunc(port.ExternalIPs, n.inAddress) ||
		slices.ContainsFunc(port.LoadBalancerVIPs, n.inAddress) {
		return true
	}
	return slices.ContainsFunc(state.Endpoints(port.Name), func(e changetracker.Endpoint) bool {
		return n.inAddress(e.Addr.Addr())
	})
}

func (n *needle) isWhole(state *changetracker.State, port *changetracker.ServicePort) bool {
	addr := n.whole.Addr()
	isVIP := port.ClusterIP == addr || slices.Contains(port.ExternalIPs, addr) || slices.Contains(port.LoadBalancerVIPs, addr)
	if isVIP && port.Port == n.whole.Port() {
		return true
	}
	return slices.ContainsFunc(state.Endpoints(port.Name), func(e changetracker.Endpoint) bool { return e.Addr == n.whole })
}

func (n *needle) inName(name types.NamespacedName) bool {
	n.buf = append(n.buf[:0], strings.ToLower(name.Namespace)...)
	n.buf = append(n.buf, '/')
	return n.in(append(n.buf, strings.ToLower(name.Name)...))
}

func (n *needle) inAddress(a netip.Addr) bool { return n.in(a.AppendTo(n.buf[:0])) }

// in reports whether text contains the needle. It keeps the memory of text for reuse.
func (n *needle) in(text []byte) bool {
	n.buf = text
	return bytes.Contains(text, n.text)
}

// search returns the names of matching Services, sorted, from offset on and at most limit
// of them, and the total number of matches.
func search(states []*changetracker.State, n *needle, offset, limit int) (names []types.NamespacedName, total int) {
	found := map[types.NamespacedName]struct{}{}
	best := smallest{keep: offset + limit}
	for _, state := range states {
		for name, port := range state.All() {
			if _, known := found[name.NamespacedName]; known || !n.matches(state, port) {
				continue
			}
			found[name.NamespacedName] = struct{}{}
			best.add(name.NamespacedName)
		}
	}
	names = best.sorted()
	return names[min(offset, len(names)):], len(found)
}

// smallest keeps the first names in sort order. It never holds more than twice as many.
type smallest struct {
	keep  int
	names []types.NamespacedName
}

func (s *smallest) add(name types.NamespacedName) {
	s.names = append(s.names, name)
	if len(s.names) >= 2*s.keep {
		s.names = s.sorted()
	}
}

func (s *smallest) sorted() []types.NamespacedName {
	slices.SortFunc(s.names, func(a, b types.NamespacedName) int {
		if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	return s.names[:min(s.keep, len(s.names))]
}
