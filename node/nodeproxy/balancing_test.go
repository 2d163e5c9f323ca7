package nodeproxy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func annotated(annotations ...string) (all map[string]string) {
	all = map[string]string{}
	for i := 0; i < len(annotations); i += 2 {
		all[annotations[i]] = annotations[i+1]
	}
	return all
}

func TestAnnotationsChooseThePolicy(t *testing.T) {
	for title, c := range map[string]struct {
		annotations map[string]string
		want        changetracker.Balancing
		lines       int
	}{
		"none":                     {nil, changetracker.Random, 0},
		"random":                   {annotated(balancingAnnotation, "random"), changetracker.Random, 0},
		"source-hash":              {annotated(balancingAnnotation, "source-hash"), changetracker.SourceHash, 0},
		"source-port-hash":         {annotated(balancingAnnotation, "source-port-hash"), changetracker.SourcePortHash, 0},
		"least-connections":        {annotated(balancingAnnotation, "least-connections"), changetracker.LeastConnections, 0},
		"unknown":                  {annotated(balancingAnnotation, "fastest"), changetracker.Random, 1},
		"ours first":               {annotated(balancingAnnotation, "random", routerAnnotation, "lc", ciliumAnnotation, "maglev"), changetracker.Random, 0},
		"kube-router rr":           {annotated(routerAnnotation, "rr"), changetracker.Random, 0},
		"kube-router lc":           {annotated(routerAnnotation, "lc"), changetracker.LeastConnections, 0},
		"kube-router sh":           {annotated(routerAnnotation, "sh"), changetracker.SourceHash, 0},
		"kube-router mh":           {annotated(routerAnnotation, "mh", routerFlagAnnotation, "flag-1"), changetracker.SourceHash, 0},
		"kube-router mh and ports": {annotated(routerAnnotation, "mh", routerFlagAnnotation, "flag-1,flag-2"), changetracker.SourcePortHash, 0},
		"kube-router dh":           {annotated(routerAnnotation, "dh"), changetracker.Random, 1},
		"Cilium maglev":            {annotated(ciliumAnnotation, "maglev"), changetracker.SourcePortHash, 0},
		"Cilium random":            {annotated(ciliumAnnotation, "random"), changetracker.Random, 0},
	} {
		t.Run(title, func(t *testing.T) {
			log, logs := observer.New(zapcore.WarnLevel)
			p := changetracker.ServicePort{}
			newAnnotations(zap.New(log)).service(&p, proxiertest.Service("test", "web", func(s *v1.Service) { s.Annotations = c.annotations }))
			if p.Balancing != c.want || logs.Len() != c.lines {
				t.Errorf("policy %v and %d lines, want %v and %d", p.Balancing, logs.Len(), c.want, c.lines)
			}
		})
	}
}

func TestAnnotationsThatAreTrue(t *testing.T) {
	for annotation, of := range map[string]func(*changetracker.ServicePort) bool{
		endAnnotation:  func(p *changetracker.ServicePort) bool { return p.EndConnections },
		keepAnnotation: func(p *changetracker.ServicePort) bool { return p.KeepFlows },
	} {
		for text, c := range map[string]struct {
			want  bool
			lines int
		}{"true": {true, 0}, "false": {false, 0}, "on": {false, 1}} {
			log, logs := observer.New(zapcore.WarnLevel)
			p := changetracker.ServicePort{}
			b := newAnnotations(zap.New(log))
			b.service(&p, proxiertest.Service("test", "web", func(s *v1.Service) { s.Annotations = annotated(annotation, text) }))
			if of(&p) != c.want || logs.Len() != c.lines {
				t.Errorf("%s=%s: %v and %d lines, want %v and %d", annotation, text, of(&p), logs.Len(), c.want, c.lines)
			}
		}
	}
}

func TestAnnotationsOfNodes(t *testing.T) {
	for text, c := range map[string]struct {
		want  changetracker.NodeSelector
		lines int
	}{"pool = edge": {"pool=edge", 0}, "": {"", 0}, "pool=(": {changetracker.NoNode, 1}} {
		log, logs := observer.New(zapcore.WarnLevel)
		var p changetracker.ServicePort
		newAnnotations(zap.New(log)).service(&p, proxiertest.Service("test", "web", func(s *v1.Service) { s.Annotations = annotated(exposeAnnotation, text) }))
		if p.ExposeOn != c.want || logs.Len() != c.lines {
			t.Errorf("%q: %q and %d lines, want %q and %d", text, p.ExposeOn, logs.Len(), c.want, c.lines)
		}
	}
}

func TestAnnotationsOfDeniedSources(t *testing.T) {
	for text, c := range map[string]struct {
		want   string
		closed bool
	}{
		"192.0.2.0/24, 2001:db8::/32 ,198.51.100.7": {"[192.0.2.0/24 198.51.100.7/32]", false},
		"2001:db8::1":                      {"[]", false},
		"192.0.2.0/24, everybody":          {"[]", true},
		"":                                 {"[]", true},
		strings.Repeat("192.0.2.1,", 2000): {"[]", true},
	} {
		log, logs := observer.New(zapcore.WarnLevel)
		p := changetracker.ServicePort{Family: v1.IPv4Protocol, LoadBalancerVIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
		newAnnotations(zap.New(log)).service(&p, proxiertest.Service("test", "web", func(s *v1.Service) { s.Annotations = annotated(deniedAnnotation, text) }))
		if got := fmt.Sprint(p.DeniedSources); got != c.want || p.DenyAllSources != c.closed || (logs.Len() == 1) != c.closed {
			t.Errorf("%.60q: %s, closed %v and %d lines; want %+v", text, got, p.DenyAllSources, logs.Len(), c)
		}
	}
}

func TestAnnotationsOfSlices(t *testing.T) {
	ready := changetracker.Endpoint{Ready: true, Serving: true}
	with := func(change func(*changetracker.Endpoint)) changetracker.Endpoint { e := ready; change(&e); return e }
	for annotation, c := range map[string]struct {
		want  changetracker.Endpoint
		lines int
	}{
		weightAnnotation + "=1":       {with(func(e *changetracker.Endpoint) { e.Weight = 1 }), 0},
		weightAnnotation + "=65535":   {with(func(e *changetracker.Endpoint) { e.Weight = 65535 }), 0},
		weightAnnotation + "=0":       {with(func(e *changetracker.Endpoint) { e.Maintenance = true }), 0},
		weightAnnotation + "=65536":   {ready, 1},
		weightAnnotation + "=-1":      {ready, 1},
		weightAnnotation + "=heavy":   {ready, 1},
		priorityAnnotation + "=0":     {ready, 0},
		priorityAnnotation + "=255":   {with(func(e *changetracker.Endpoint) { e.Priority = 255 }), 0},
		priorityAnnotation + "=256":   {ready, 1},
		priorityAnnotation + "=first": {ready, 1},
	} {
		t.Run(annotation, func(t *testing.T) {
			log, logs := observer.New(zapcore.WarnLevel)
			name, text, _ := strings.Cut(annotation, "=")
			slice := proxiertest.Slice("test", "web", discovery.AddressTypeIPv4, func(s *discovery.EndpointSlice) { s.Annotations = annotated(name, text) })
			got := ready
			newAnnotations(zap.New(log)).endpoint(&got, &discovery.Endpoint{}, slice)
			if !got.Equal(&c.want) || logs.Len() != c.lines {
				t.Errorf("%v and %d lines, want %v and %d", &got, logs.Len(), &c.want, c.lines)
			}
		})
	}
}

func TestAnnotationsOfFailover(t *testing.T) {
	for texts, want := range map[string]struct {
		failover changetracker.Failover
		lines    int
	}{
		"50 true":    {changetracker.Failover{Share: 50, End: true}, 0},
		"100 false":  {changetracker.Failover{Share: 100}, 0},
		"101 true":   {changetracker.Failover{End: true}, 1},
		"half maybe": {changetracker.Failover{}, 2},
	} {
		log, logs := observer.New(zapcore.WarnLevel)
		share, end, _ := strings.Cut(texts, " ")
		var p changetracker.ServicePort
		newAnnotations(zap.New(log)).service(&p, proxiertest.Service("test", "web", func(s *v1.Service) {
			s.Annotations = annotated(failoverShareAnnotation, share, failoverEndAnnotation, end)
		}))
		if p.Failover != want.failover || logs.Len() != want.lines {
			t.Errorf("%s: %+v and %d lines, want %+v and %d", texts, p.Failover, logs.Len(), want.failover, want.lines)
		}
	}
}
