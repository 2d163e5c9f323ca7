package nodeproxy

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Annotations that choose the load balancing policy of a Service, in this order, and the weight
// of all endpoints of an EndpointSlice.
const (
	balancingAnnotation  = "serviceplane.io/load-balancing"
	routerAnnotation     = "kube-router.io/service.scheduler"
	routerFlagAnnotation = "kube-router.io/service.schedflags"
	ciliumAnnotation     = "service.cilium.io/lb-algorithm"

	weightAnnotation = "serviceplane.io/weight"

	// endAnnotation on a Service ends TCP connections to endpoints that are gone, if it is "true".
	endAnnotation = "serviceplane.io/end-connections"
)

// balancing reads annotations, and logs what it cannot read.
type balancing struct{ bad *badAnnotations }

// decorate adds the hooks of b.
func (b balancing) decorate(o *changetracker.Options) {
	o.DecorateService, o.DecorateEndpoint = b.service, b.endpoint
}

// service is a changetracker.Options.DecorateService.
func (b balancing) service(p *changetracker.ServicePort, s *v1.Service) {
	if text, ok := s.Annotations[endAnnotation]; ok {
		var err error
		if p.EndConnections, err = strconv.ParseBool(text); err != nil {
			b.bad.ignore(s.Namespace+"/"+s.Name, endAnnotation, text, err)
		}
	}
	if text, ok := s.Annotations[balancingAnnotation]; ok {
		if err := p.Balancing.UnmarshalText([]byte(text)); err != nil {
			b.bad.ignore(s.Namespace+"/"+s.Name, balancingAnnotation, text, err)
		}
		return
	}
	if scheduler, ok := s.Annotations[routerAnnotation]; ok {
		p.Balancing, ok = routerBalancing(scheduler, s.Annotations[routerFlagAnnotation])
		if !ok {
			b.bad.ignore(s.Namespace+"/"+s.Name, routerAnnotation, scheduler, errNoEquivalent)
		}
		return
	}
	if s.Annotations[ciliumAnnotation] == "maglev" {
		p.Balancing = changetracker.SourcePortHash
	}
}

var errNoEquivalent = errors.New("no policy is like this scheduler: endpoints are chosen at random")

// routerBalancing translates IPVS's schedulers, as kube-router's documentation names them. The
// second flag of the scheduler mh hashes ports too.
func routerBalancing(scheduler, flags string) (b changetracker.Balancing, ok bool) {
	switch scheduler {
	case "rr", "wrr":
		return changetracker.Random, true
	case "lc", "wlc":
		return changetracker.LeastConnections, true
	case "sh":
		return changetracker.SourceHash, true
	case "mh":
		if slices.Contains(strings.Split(flags, ","), "flag-2") {
			return changetracker.SourcePortHash, true
		}
		return changetracker.SourceHash, true
	default:
		return changetracker.Random, false
	}
}

// endpoint is a changetracker.Options.DecorateEndpoint. An endpoint of weight 0 gets no new
// connections, and keeps those that it has.
func (b balancing) endpoint(e *changetracker.Endpoint, _ *discovery.Endpoint, s *discovery.EndpointSlice) {
	text, ok := s.Annotations[weightAnnotation]
	if !ok {
		return
	}
	weight, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		b.bad.ignore(s.Namespace+"/"+s.Name, weightAnnotation, text, err)
		return
	}
	e.Weight, e.Ready = uint16(weight), e.Ready && weight > 0
}
