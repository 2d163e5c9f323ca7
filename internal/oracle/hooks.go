package oracle

import (
	"fmt"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// The API has no fields for groups of endpoints, maintenance, Failover, ExposeOn and DeniedSources. In a Cluster, the host name of an endpoint
// stands for the first two, and annotations of a Service for the others.
const (
	annotationFailover = "oracle/failover"
	annotationKeep     = "oracle/keep-flows"
	annotationExpose   = "oracle/expose-on"
	annotationDenied   = "oracle/denied-sources"
	annotationLimit    = "oracle/client-limit"
	labelPool          = "pool"
	hostGroup          = "group-%d"
	hostMaintenance    = "maintenance"
)

// Group is a host name: the endpoint is of a group.
func Group(n int) *string { return new(fmt.Sprintf(hostGroup, n)) }

// Maintenance is a host name: the endpoint is in maintenance.
func Maintenance() *string { return new(hostMaintenance) }

// SetFailover sets the Failover of a Service.
func SetFailover(s *v1.Service, share int, end bool) {
	annotate(s, annotationFailover, fmt.Sprint(share, " ", end))
}

// SetKeepFlows sets KeepFlows of a Service.
func SetKeepFlows(s *v1.Service) { annotate(s, annotationKeep, "true") }

// SetExposeOn exposes a Service on the nodes of a pool.
func SetExposeOn(s *v1.Service, pool string) { annotate(s, annotationExpose, pool) }

// Pool are the labels of a node of a pool.
func Pool(name string) map[string]string { return map[string]string{labelPool: name} }

// exposed reports whether a Service is exposed on a node.
func exposed(s *v1.Service, node *changetracker.Node) bool {
	pool, some := s.Annotations[annotationExpose]
	return !some || node.Labels[labelPool] == pool
}

// SetDenied denies sources.
func SetDenied(s *v1.Service, ranges ...string) {
	annotate(s, annotationDenied, strings.Join(ranges, " "))
}

// SetClientLimit sets the ClientLimit of a Service.
func SetClientLimit(s *v1.Service, limit string) { annotate(s, annotationLimit, limit) }

// Denied are the denied sources of a family.
func Denied(s *v1.Service, family v1.IPFamily) (ranges []netip.Prefix) {
	for text := range strings.FieldsSeq(s.Annotations[annotationDenied]) {
		if r := netip.MustParsePrefix(text); r.Addr().Is4() == (family == v1.IPv4Protocol) {
			ranges = append(ranges, r)
		}
	}
	return ranges
}

func annotate(s *v1.Service, name, value string) {
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[name] = value
}

func failover(s *v1.Service) (share int, end bool) {
	_, _ = fmt.Sscan(s.Annotations[annotationFailover], &share, &end) // without, both are zero
	return share, end
}

func standing(e *discovery.Endpoint) (group int, maintenance bool) {
	if e.Hostname == nil {
		return 0, false
	}
	_, _ = fmt.Sscanf(*e.Hostname, hostGroup, &group)
	return group, strings.HasPrefix(*e.Hostname, hostMaintenance)
}

// Tracker returns options with which a tracker reads what the Cluster has.
func (c *Cluster) Tracker() changetracker.ObjectOptions {
	return changetracker.ObjectOptions{
		StrictSourceRanges: c.StrictSourceRanges,
		DecorateService: func(p *changetracker.ServicePort, s *v1.Service) {
			share, end := failover(s)
			p.DeniedSources = Denied(s, p.Family)
			p.KeepFlows = s.Annotations[annotationKeep] != ""
			p.ClientLimit, _ = changetracker.ParseClientLimit(s.Annotations[annotationLimit])
			if pool, some := s.Annotations[annotationExpose]; some {
				p.ExposeOn = changetracker.NodeSelector(labelPool + "=" + pool)
			}
			p.Failover = changetracker.Failover{Share: uint8(share), End: end}
		},
		DecorateEndpoint: func(e *changetracker.Endpoint, api *discovery.Endpoint, _ *discovery.EndpointSlice) {
			group, maintenance := standing(api)
			e.Priority, e.Maintenance = uint8(group), maintenance
		},
	}
}
