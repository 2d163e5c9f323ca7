package nodeproxy

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestHostileAnnotationsLogLittle: whatever the value of an annotation that nodeproxy reads, a
// Service of 20 ports and a slice of 100 endpoints log one short line for it, when they come and
// when it changes, and nothing when something else changes.
func TestHostileAnnotationsLogLittle(t *testing.T) {
	const most = 1 << 10 // bytes of a line
	values := map[string]string{
		"long": strings.Repeat("x", 200<<10), "words": strings.Repeat("a=b ", 50<<10), "no UTF-8": strings.Repeat("\xff\xfe", 100<<10), "lines": strings.Repeat("\n", 200<<10),
		"digits": strings.Repeat("9", 200<<10), "setting": "tcp " + strings.Repeat("y", 200<<10), "value": "tcp interval=" + strings.Repeat("1", 200<<10), "path": "http path=" + strings.Repeat("z", 200<<10),
	}
	perPort := map[string]bool{healthAnnotation: true} // endpointhealth has a line for each service port
	for _, annotation := range []string{
		endAnnotation, balancingAnnotation, routerAnnotation, ciliumAnnotation, weightAnnotation, priorityAnnotation, failoverShareAnnotation, failoverEndAnnotation, keepAnnotation, exposeAnnotation, deniedAnnotation, limitAnnotation, fastPathAnnotation, ebpfAnnotation,
		healthAnnotation, v1.EndpointsLastChangeTriggerTime, v1.AnnotationTopologyMode,
	} {
		for what, value := range values {
			var out bytes.Buffer
			log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&out), zapcore.DebugLevel))
			o := parse(t, "--proxy-mode=ebpf", "--nftables-fast-path=annotated", "--endpoint-health")
			options := changetracker.Options{Logger: log}
			o.decorate(&options.ObjectOptions, log)
			tracker, err := changetracker.New(options)
			if err != nil {
				t.Fatal(err)
			}
			logged := func(when string, lines int) {
				if perPort[annotation] {
					for _, p := range ports(t, tracker) {
						if _, _, err := o.health.choose(p); err != nil && len(err.Error()) > most {
							t.Fatalf("%s: %s, %s: an error of %d bytes", annotation, what, when, len(err.Error()))
						}
					}
				}
				if n := out.Len(); n > lines*most || bytes.Count(out.Bytes(), []byte("\n")) > lines {
					t.Errorf("%s: %s, %s: %d bytes in %d lines logged, want %d lines at most", annotation, what, when, n, bytes.Count(out.Bytes(), []byte("\n")), lines)
				}
				out.Reset()
			}
			service, slice := hostile(annotation, value, 0)
			tracker.Services.Update(nil, service)
			tracker.Endpoints.EndpointSliceUpdate(slice, false)
			logged("at the start", 1)
			for i := range 3 {
				again, slice := hostile(annotation, value, i+1)
				tracker.Services.Update(service, again)
				tracker.Endpoints.EndpointSliceUpdate(slice, false)
				lines := 0
				if annotation == v1.EndpointsLastChangeTriggerTime {
					lines = 1 // it is of each change
				}
				logged("after another change", lines)
				service = again
			}
			again, slice := hostile(annotation, value+"!", 9)
			tracker.Services.Update(service, again)
			tracker.Endpoints.EndpointSliceUpdate(slice, false)
			logged("after it has changed", 1)
		}
	}
}

// ports returns all service ports of a tracker.
func ports(t *testing.T, tracker *changetracker.Tracker) (all []*changetracker.ServicePort) {
	t.Helper()
	err := tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		for _, p := range delta.After.All() {
			all = append(all, p)
		}
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// hostile returns a Service or an EndpointSlice with an annotation, and the other one without it.
// The version changes something else.
func hostile(annotation, value string, version int) (*v1.Service, *discovery.EndpointSlice) {
	service := proxiertest.Service("ns", "web", proxiertest.ClusterIPs("10.0.0.1"))
	service.Spec.Ports = nil
	for i := range 20 {
		service.Spec.Ports = append(service.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Protocol: v1.ProtocolTCP, Port: int32(1000 + i + version)})
	}
	slice := proxiertest.Slice("ns", "web", discovery.AddressTypeIPv4)
	for i := range 100 {
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.%d.%d.%d", version+1, i/250, i%250+1)}})
	}
	service.Annotations = map[string]string{annotation: value}
	slice.Annotations = map[string]string{annotation: value}
	return service, slice
}
