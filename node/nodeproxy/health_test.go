package nodeproxy

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func healthOf(t *testing.T, h *healthFlags, protocol v1.Protocol, annotations map[string]string) (endpointhealth.CheckPolicy, bool, error) {
	t.Helper()
	p := changetracker.ServicePort{Name: changetracker.ServicePortName{Port: "web", Protocol: protocol}}
	h.decorate(&p, proxiertest.Service("test", "web", func(s *v1.Service) { s.Annotations = annotations }))
	return h.choose(&p)
}

// Annotations choose the health check of all ports, of one port, and by default.
func TestAnnotationsChooseTheHealthCheck(t *testing.T) {
	t.Parallel()
	const share = 0.3
	none := endpointhealth.CheckPolicy{}
	tcp := endpointhealth.CheckPolicy{Probe: endpointhealth.TCPProbe{}, MaxEjected: share, PassiveFailures: -1}
	admin := tcp
	admin.Probe = endpointhealth.TCPProbe{Port: 9000}
	page := endpointhealth.CheckPolicy{
		Probe:    endpointhealth.HTTPProbe{Port: 8081, Path: "/healthz?full=1", Host: "web.example.net", Status: 204},
		Interval: 5 * time.Second, Timeout: 2 * time.Second, Failures: 3, Successes: 4, PassiveFailures: 6,
		EjectFor: time.Minute, SlowStart: 90 * time.Second, MaxEjected: share,
	}
	const ofPort = healthAnnotation + ".web"
	for title, c := range map[string]struct {
		annotations map[string]string
		protocol    v1.Protocol
		byDefault   string
		want        endpointhealth.CheckPolicy
	}{
		"none":            {nil, v1.ProtocolTCP, "off", none},
		"tcp":             {annotated(healthAnnotation, "tcp"), v1.ProtocolTCP, "off", tcp},
		"default":         {nil, v1.ProtocolTCP, "tcp", tcp},
		"off":             {annotated(healthAnnotation, "off"), v1.ProtocolTCP, "tcp", none},
		"a port's own":    {annotated(healthAnnotation, "off", ofPort, "tcp"), v1.ProtocolTCP, "off", tcp},
		"of another port": {annotated(healthAnnotation, "tcp", healthAnnotation+".other", "off"), v1.ProtocolTCP, "off", tcp},
		"connections":     {annotated(healthAnnotation, "connections eject-for=1m"), v1.ProtocolTCP, "off", endpointhealth.CheckPolicy{EjectFor: time.Minute, MaxEjected: share}},
		"UDP beside TCP":  {annotated(healthAnnotation, "tcp"), v1.ProtocolUDP, "off", none},
		"UDP with a port": {annotated(healthAnnotation, "tcp port=9000"), v1.ProtocolUDP, "off", admin},
		"every setting": {annotated(healthAnnotation, "http  port=8081 path=/healthz?full=1 host=web.example.net status=204 interval=5s timeout=2s"+
			" failures=3 successes=4 connections=6 eject-for=1m slow-start=90s"), v1.ProtocolTCP, "off", page},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			got, ok, err := healthOf(t, &healthFlags{enabled: true, byDefault: c.byDefault, maxEjected: 30}, c.protocol, c.annotations)
			if err != nil || ok != (c.want != none) || ok && got != c.want {
				t.Errorf("%+v, %t, %v, want %+v", got, ok, err, c.want)
			}
		})
	}
}

// TestBadHealthChecks: the error names the annotation, its value and what is wrong.
func TestBadHealthChecks(t *testing.T) {
	t.Parallel()
	for text, why := range map[string]string{
		"": "it is empty", "ping": "ping is no kind", "off port=1": "off has no", "tcp path=/": "path=/: tcp has no such setting",
		"http path=healthz": "path=healthz: want a value that begins", "http port=0": "port=0: want a port", "http port=65536": "port=65536: want a port",
		"tcp interval=0s": "interval=0s: want a duration", "tcp interval=1ms": "Interval: 1ms: want at least", "tcp interval=900ms": "interval=900ms: want at least 1s", "tcp interval=1s timeout=2s": "Timeout: 2s",
		"tcp failures=0": "failures=0: want a number", "tcp failures": "failures: want a number", "connections port=80": "port=80: connections has no",
		"connections interval=1s": "connections has no", "http status=600": "want a number from 1 to 599", "tcp slow-start=25h": "SlowStart: 25h",
	} {
		_, ok, err := healthOf(t, &healthFlags{maxEjected: 50}, v1.ProtocolTCP, annotated(healthAnnotation, text))
		if ok || err == nil || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), healthAnnotation) {
			t.Errorf("%q: %t, %v, want %s", text, ok, err, why)
		}
	}
	o := &options{health: healthFlags{byDefault: "tcp"}}
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "--endpoint-health-default=tcp: want nothing without --endpoint-health") ||
		!strings.Contains(err.Error(), "--endpoint-health-max-ejected=0: want 1 to 100") {
		t.Errorf("flags: %v", err)
	}
}
