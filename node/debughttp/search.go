package debughttp

import (
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// needle is the text of a search for Services.
type needle struct {
	text           string         // in lower case
	line, lineHead string         // the text as a whole line, and as the beginning of one
	whole          netip.AddrPort // if the text is an address and a port
}

func newNeedle(text string) *needle {
	n := &needle{text: strings.ToLower(strings.TrimSpace(strings.ReplaceAll(text, "\n", " ")))}
	if whole, err := netip.ParseAddrPort(n.text); err == nil {
		n.whole = netip.AddrPortFrom(whole.Addr().Unmap(), whole.Port())
		n.text = n.whole.Addr().String()
	}
	n.lineHead = "\n" + n.text
	n.line = n.lineHead + "\n"
	return n
}

// rank says how well a Service matches: better ones come first.
type rank int

// The ranks. A name, namespace/name, VIP, node port or endpoint address is the text, begins with
// it, or contains it.
const (
	rankExact rank = iota
	rankPrefix
	rankContains
	ranks
	noMatch = ranks
)

func (n *needle) rank(now *resolved, s *listedService) rank {
	switch {
	case n.text == "":
		return rankExact
	case !strings.Contains(s.text, n.text):
		return noMatch
	case n.whole.IsValid():
		if strings.Contains(s.text, n.line) && n.isWhole(now, s.name) {
			return rankExact
		}
		return noMatch
	case strings.Contains(s.text, n.line):
		return rankExact
	case strings.Contains(s.text, n.lineHead):
		return rankPrefix
	default:
		return rankContains
	}
}

// isWhole reports whether a Service has a VIP or endpoint with that address and port.
func (n *needle) isWhole(now *resolved, name types.NamespacedName) (is bool) {
	addr := n.whole.Addr()
	now.servicePorts(name, func(family *desired.Resolved, port changetracker.ServicePortName) {
		p, ok := family.State().Service(port)
		isVIP := ok && (p.ClusterIP == addr || slices.Contains(p.ExternalIPs, addr) || slices.Contains(p.LoadBalancerVIPs, addr))
		is = is || isVIP && p.Port == n.whole.Port() ||
			slices.ContainsFunc(family.State().Endpoints(port), func(e changetracker.Endpoint) bool { return e.Addr == n.whole })
	})
	return is
}

// selection is a request for Services.
type selection struct {
	needle        *needle
	namespace     string // empty: all
	filters       filters
	failed        map[types.NamespacedName]bool
	offset, limit int
}

// found are the Services of a selection.
type found struct {
	// matches are the first ones of each rank, as many as the window may need.
	matches [ranks][]*listedService
	totals  [ranks]int
	// all are the Services that would match without filters, and counts those that have each.
	all    int
	counts [len(filterNames)]int
}

func (s *selection) from(all []*listedService, now *resolved) (f found) {
	for _, service := range all {
		if s.namespace != "" && service.name.Namespace != s.namespace {
			continue
		}
		rank := s.needle.rank(now, service)
		if rank == noMatch {
			continue
		}
		has := service.filters
		if s.failed[service.name] {
			has |= isFailed
		}
		f.count(has)
		if has&s.filters != s.filters {
			continue
		}
		if f.totals[rank]++; f.totals[rank] <= s.offset+s.limit {
			f.matches[rank] = append(f.matches[rank], service)
		}
	}
	return f
}

func (f *found) count(has filters) {
	f.all++
	for i := range f.counts {
		f.counts[i] += int(has >> i & 1)
	}
}

func (f *found) total() (n int) {
	for _, total := range f.totals {
		n += total
	}
	return n
}

// window returns some of the Services, the best matches first.
func (f *found) window(offset, limit int) (some []*listedService) {
	for rank, list := range f.matches {
		skipped := min(offset, len(list))
		some = append(some, first(limit-len(some), list[skipped:])...)
		offset -= min(offset, f.totals[rank])
	}
	return some
}

// countsByName are the counts as the answer has them.
func (f *found) countsByName() map[string]int {
	counts := map[string]int{"all": f.all}
	for i, name := range filterNames {
		counts[name] = f.counts[i]
	}
	return counts
}
