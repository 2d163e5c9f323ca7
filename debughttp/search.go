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

// needle is what Services are searched for.
type needle struct {
	text []byte // in lower case
	// mayBeAddress and mayBePort keep a search for a name from looking at addresses.
	mayBeAddress, mayBePort bool
	// whole is set if the text is an address and a port.
	whole netip.AddrPort
	buf   []byte // of the last text that was looked at
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

// matches says whether the text is in a service port's name, VIPs or node port, or in
// the address of one of its endpoints.
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

// in keeps the memory of the text that it looks at.
func (n *needle) in(text []byte) bool {
	n.buf = text
	return bytes.Contains(text, n.text)
}

// search returns the names of the Services that match, at most limit of them after
// offset in order of name, and how many match.
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

// smallest holds the first names of many, in order of name. It sorts only as much as
// it keeps.
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
