package nodeproxy

import (
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

func TestAnAnnotationEndsConnections(t *testing.T) {
	for text, c := range map[string]struct {
		want  bool
		lines int
	}{"true": {true, 0}, "false": {false, 0}, "on": {false, 1}} {
		log, logs := observer.New(zapcore.WarnLevel)
		p := changetracker.ServicePort{}
		b := newAnnotations(zap.New(log))
		b.service(&p, proxiertest.Service("test", "web", func(s *v1.Service) { s.Annotations = annotated(endAnnotation, text) }))
		if p.EndConnections != c.want || logs.Len() != c.lines {
			t.Errorf("%s: %v and %d lines, want %v and %d", text, p.EndConnections, logs.Len(), c.want, c.lines)
		}
	}
}

func TestAnnotationsGiveWeights(t *testing.T) {
	for text, c := range map[string]struct {
		weight uint16
		ready  bool
		lines  int
	}{
		"1": {1, true, 0}, "5": {5, true, 0}, "65535": {65535, true, 0}, "0": {0, false, 0}, "65536": {0, true, 1}, "-1": {0, true, 1}, "heavy": {0, true, 1},
	} {
		t.Run(text, func(t *testing.T) {
			log, logs := observer.New(zapcore.WarnLevel)
			e := changetracker.Endpoint{Ready: true, Serving: true}
			slice := proxiertest.Slice("test", "web", discovery.AddressTypeIPv4, func(s *discovery.EndpointSlice) { s.Annotations = annotated(weightAnnotation, text) })
			newAnnotations(zap.New(log)).endpoint(&e, &discovery.Endpoint{}, slice)
			if e.Weight != c.weight || e.Ready != c.ready || !e.Serving || logs.Len() != c.lines {
				t.Errorf("weight %d, ready %t, serving %t, %d lines; want %d, %t, true, %d", e.Weight, e.Ready, e.Serving, logs.Len(), c.weight, c.ready, c.lines)
			}
		})
	}
}
