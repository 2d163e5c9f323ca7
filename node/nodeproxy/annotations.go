package nodeproxy

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

	// endAnnotation ends TCP connections of a Service to endpoints that are gone, if it is "true".
	endAnnotation = "serviceplane.io/end-connections"

	// keepAnnotation lets UDP flows of a Service stay with endpoints that are only not ready, if it is "true".
	keepAnnotation = "serviceplane.io/keep-flows"

	// deniedAnnotation has a Service's DeniedSources, separated by commas.
	deniedAnnotation = "serviceplane.io/denied-sources"

	// limitAnnotation is a Service's ClientLimit.
	limitAnnotation = "serviceplane.io/client-limit"

	// exposeAnnotation is a Service's ExposeOn.
	exposeAnnotation = "serviceplane.io/expose-on"

	// priorityAnnotation is the Priority of all endpoints of an EndpointSlice; the others are a Service's Failover.
	priorityAnnotation      = "serviceplane.io/priority"
	failoverShareAnnotation = "serviceplane.io/failover-share"
	failoverEndAnnotation   = "serviceplane.io/failover-end"
)

// annotations reads annotations, and logs what it cannot read, once for each value. Hooks meet a value
// once for each port of a Service, or each endpoint of a slice, and again with each change, and who
// may write an object may make it long.
type annotations struct {
	log  *zap.Logger
	seed maphash.Seed

	mu   sync.Mutex
	said map[annotationOf]uint64 // the hash of the value that was logged
	// denied and exposed are of the last text: hooks run for each port of a Service.
	denied  last[[]netip.Prefix]
	exposed last[changetracker.NodeSelector]
}

// last is the last text that was parsed.
type last[T any] struct {
	text  string
	value T
	err   error
	some  bool
}

func (l *last[T]) parse(mu *sync.Mutex, text string, parse func(string) (T, error)) (T, error) {
	mu.Lock()
	defer mu.Unlock()
	if l.text != text || !l.some {
		value, err := parse(text)
		*l = last[T]{text, value, err, true}
	}
	return l.value, l.err
}

type annotationOf struct{ object, name string }

func newAnnotations(log *zap.Logger) *annotations {
	return &annotations{log: log, seed: maphash.MakeSeed(), said: map[annotationOf]uint64{}}
}

// maxSaid bounds the memory of what was logged. Nobody tells when an object is gone.
const maxSaid = 10_000

// ignore logs that the annotation of an object has no effect.
func (a *annotations) ignore(of metav1.Object, name, value string, err error) {
	a.say("annotation is ignored: its value is invalid", of, name, value, err)
}

// say logs what the value of an annotation leads to.
func (a *annotations) say(message string, of metav1.Object, name, value string, err error) {
	object := of.GetNamespace() + "/" + of.GetName()
	at, hash := annotationOf{object, name}, maphash.String(a.seed, value)
	a.mu.Lock()
	defer a.mu.Unlock()
	if said, ok := a.said[at]; ok && said == hash {
		return
	}
	if len(a.said) >= maxSaid {
		clear(a.said)
	}
	a.said[at] = hash
	a.log.Warn(message, zap.String("object", object), zap.String("annotation", name), zap.String("value", readable(value)), zap.Error(short(err)))
}

// truth reads whether an annotation is true. ok is false if there is none that can be read.
func (a *annotations) truth(of metav1.Object, name string) (is, ok bool) {
	return interpret(a, of, name, strconv.ParseBool)
}

// number reads a number from 0 to most.
func (a *annotations) number(of metav1.Object, name string, most uint64) (n uint64, ok bool) {
	return interpret(a, of, name, func(text string) (uint64, error) {
		n, err := strconv.ParseUint(text, 10, 64)
		if err == nil && n > most {
			err = fmt.Errorf("want a number from 0 to %d", most)
		}
		return n, err
	})
}

func interpret[T any](a *annotations, of metav1.Object, name string, parse func(string) (T, error)) (value T, ok bool) {
	text, ok := of.GetAnnotations()[name]
	if !ok {
		return value, false
	}
	value, err := parse(text)
	if err != nil {
		a.ignore(of, name, text, err)
	}
	return value, err == nil
}

// maxReadable is how many bytes of an annotation a line of the log has.
const maxReadable = 64

// readable is the beginning of a long text.
func readable(text string) string {
	if len(text) <= maxReadable {
		return strings.ToValidUTF8(text, "?")
	}
	end := maxReadable
	for end > maxReadable-utf8.UTFMax && !utf8.RuneStart(text[end]) {
		end--
	}
	return strings.ToValidUTF8(text[:end], "?") + "…"
}

// short is an error that does not repeat a long value.
func short(err error) error {
	if number := (*strconv.NumError)(nil); errors.As(err, &number) {
		return number.Err
	}
	if text := err.Error(); len(text) > 2*maxReadable {
		return errors.New(readable(text))
	}
	return err
}

// service is a changetracker.Options.DecorateService.
func (a *annotations) service(p *changetracker.ServicePort, s *v1.Service) {
	p.EndConnections, _ = a.truth(s, endAnnotation)
	p.KeepFlows, _ = a.truth(s, keepAnnotation)
	p.Failover.End, _ = a.truth(s, failoverEndAnnotation)
	p.ClientLimit, _ = interpret(a, s, limitAnnotation, changetracker.ParseClientLimit)
	a.deny(p, s)
	a.expose(p, s)
	if share, ok := a.number(s, failoverShareAnnotation, 100); ok {
		p.Failover.Share = uint8(share)
	}
	if text, ok := s.Annotations[balancingAnnotation]; ok {
		if err := p.Balancing.UnmarshalText([]byte(text)); err != nil {
			a.ignore(s, balancingAnnotation, text, err)
		}
		return
	}
	if scheduler, ok := s.Annotations[routerAnnotation]; ok {
		p.Balancing, ok = routerBalancing(scheduler, s.Annotations[routerFlagAnnotation])
		if !ok {
			a.ignore(s, routerAnnotation, scheduler, errNoEquivalent)
		}
		return
	}
	if s.Annotations[ciliumAnnotation] == "maglev" {
		p.Balancing = changetracker.SourcePortHash
	}
}

// longestDenied bounds the time that the sources of each port take.
const longestDenied = 16 << 10

// deny denies sources, or all of them if the annotation is invalid: whoever writes it wants to keep somebody out.
func (a *annotations) deny(p *changetracker.ServicePort, s *v1.Service) {
	text, ok := s.Annotations[deniedAnnotation]
	if !ok || len(p.LoadBalancerVIPs) == 0 {
		return
	}
	denied, err := a.denied.parse(&a.mu, text, parseSources)
	if err != nil {
		a.say("load balancer IPs are closed to all sources: the value of the annotation is invalid", s, deniedAnnotation, text, err)
		p.DenyAllSources = true
		return
	}
	for _, r := range denied {
		if r.Addr().Is4() == (p.Family == v1.IPv4Protocol) {
			p.DeniedSources = append(p.DeniedSources, r)
		}
	}
}

// expose exposes a Service on nodes, or on none if the annotation is invalid.
func (a *annotations) expose(p *changetracker.ServicePort, s *v1.Service) {
	text, ok := s.Annotations[exposeAnnotation]
	if !ok {
		return
	}
	var err error
	if p.ExposeOn, err = a.exposed.parse(&a.mu, text, changetracker.ParseNodeSelector); err != nil {
		a.say("Service is exposed on no node: the value of the annotation is invalid", s, exposeAnnotation, text, err)
	}
}

// parseSources parses ranges and addresses that are separated by commas.
func parseSources(text string) (all []netip.Prefix, err error) {
	if len(text) > longestDenied {
		return nil, fmt.Errorf("it has %d bytes: want %d at most", len(text), longestDenied)
	}
	for one := range strings.SplitSeq(text, ",") {
		r, ok := changetracker.ParseRange(one)
		if !ok {
			return nil, fmt.Errorf("%q: want a range such as 192.0.2.0/24, or an address", readable(one))
		}
		all = append(all, r)
	}
	return all, nil
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

// endpoint is a changetracker.Options.DecorateEndpoint. An endpoint of weight 0 is in maintenance.
func (a *annotations) endpoint(e *changetracker.Endpoint, _ *discovery.Endpoint, s *discovery.EndpointSlice) {
	if weight, ok := a.number(s, weightAnnotation, math.MaxUint16); ok {
		e.Weight, e.Maintenance = uint16(weight), weight == 0
	}
	if priority, ok := a.number(s, priorityAnnotation, math.MaxUint8); ok {
		e.Priority = uint8(priority)
	}
}
