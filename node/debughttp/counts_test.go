package debughttp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// countingSource is a Source whose families count.
type countingSource struct {
	fakeSource

	counts map[v1.IPFamily]connection.Counts
	errs   map[v1.IPFamily]error
}

func (s *countingSource) Counts(_ context.Context, family v1.IPFamily) (connection.Counts, error) {
	return s.counts[family], s.errs[family]
}

func counted(name string, connections uint64, endpoints ...string) connection.ServicePortCounts {
	p := connection.ServicePortCounts{
		Name:        changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "shop", Name: name}, Port: "http", Protocol: v1.ProtocolTCP},
		Connections: connections,
	}
	for i, e := range endpoints {
		p.Endpoints = append(p.Endpoints, connection.EndpointCounts{Endpoint: netip.MustParseAddrPort(e), Connections: uint64(i + 1)})
	}
	return p
}

func newCounting() *countingSource {
	since := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	s := &countingSource{
		counts: map[v1.IPFamily]connection.Counts{
			v1.IPv4Protocol: {Since: since, Connections: true, ServicePorts: []connection.ServicePortCounts{
				counted("quiet", 0), counted("web", 12, "10.244.1.5:8080", "10.244.2.5:8080"),
			}},
			v1.IPv6Protocol: {Since: since.Add(time.Second), Connections: true, ServicePorts: []connection.ServicePortCounts{counted("web", 70, "[fd00:244:1::5]:8080")}},
		},
		errs: map[v1.IPFamily]error{},
	}
	s.status.Families = map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: {}, v1.IPv6Protocol: {}}
	return s
}

func TestCountsAnswersInJSON(t *testing.T) {
	h := debughttp.Handler(newCounting())
	const (
		web6  = `{"connections":70,"endpoints":[{"address":"[fd00:244:1::5]:8080","connections":1}],"family":"IPv6","name":"web","namespace":"shop","portName":"http","protocol":"TCP"}`
		web4  = `{"connections":12,"endpoints":[{"address":"10.244.1.5:8080","connections":1},{"address":"10.244.2.5:8080","connections":2}],"family":"IPv4","name":"web","namespace":"shop","portName":"http","protocol":"TCP"}`
		quiet = `{"connections":0,"endpoints":[],"family":"IPv4","name":"quiet","namespace":"shop","portName":"http","protocol":"TCP"}`
		since = `"since":"2026-03-04T05:06:07Z"`
	)
	for query, want := range map[string]string{
		"":                              fmt.Sprintf(`{"servicePorts":[%s,%s,%s],%s,"total":3}`, web6, web4, quiet, since),
		"?namespace=shop&name=quiet":    fmt.Sprintf(`{"servicePorts":[%s],%s,"total":1}`, quiet, since),
		"?limit=1":                      fmt.Sprintf(`{"servicePorts":[%s],%s,"total":3}`, web6, since),
		"?namespace=other":              fmt.Sprintf(`{"servicePorts":[],%s,"total":0}`, since),
		"?namespace=shop&name=web-site": fmt.Sprintf(`{"servicePorts":[],%s,"total":0}`, since),
	} {
		wantAt(t, get(t, h, "/counts"+query, http.StatusOK), want)
	}
}

// Counts have the traffic that is counted: sockets count no packets.
func TestCountsHaveTraffic(t *testing.T) {
	s := newCounting()
	h := debughttp.Handler(s)
	counts := s.counts[v1.IPv4Protocol]
	counts.Connections, counts.Traffic, counts.TrafficLosses = false, true, 3
	counts.ServicePorts = []connection.ServicePortCounts{counted("few", 0), counted("many", 0), counted("web", 0, "10.244.1.5:8080")}
	counts.ServicePorts[1].Traffic = connection.Traffic{BytesIn: 1, BytesOut: 99}
	counts.ServicePorts[2].Traffic = connection.Traffic{PacketsIn: 1, BytesIn: 50}
	counts.ServicePorts[2].Endpoints[0].Traffic = connection.Traffic{PacketsIn: 1, BytesIn: 49}
	s.counts = map[v1.IPFamily]connection.Counts{v1.IPv4Protocol: counts, v1.IPv6Protocol: {TrafficProblem: "no accounting"}}
	const format = `{"bytesIn":%d,"bytesOut":%d,"endpoints":[%s],"family":"IPv4","name":%q,"namespace":"shop",%s"portName":"http","protocol":"TCP"}`
	const endpoint = `{"address":"10.244.1.5:8080","bytesIn":49,"bytesOut":0,"packetsIn":1,"packetsOut":0}`
	many := fmt.Sprintf(format, 1, 99, "", "many", "")
	web := fmt.Sprintf(format, 50, 0, endpoint, "web", `"packetsIn":1,"packetsOut":0,`)
	few := fmt.Sprintf(format, 0, 0, "", "few", `"packetsIn":0,"packetsOut":0,`)
	wantAt(t, get(t, h, "/counts", http.StatusOK),
		fmt.Sprintf(`{"servicePorts":[%s,%s,%s],"since":"2026-03-04T05:06:07Z","total":3,"traffic":true,"trafficLosses":3,"trafficProblem":"no accounting"}`, many, web, few))
}

func TestCountsErrors(t *testing.T) {
	s := newCounting()
	h := debughttp.Handler(s)
	get(t, h, "/counts?limit=0", http.StatusBadRequest)
	s.errs[v1.IPv4Protocol] = fmt.Errorf("off: %w", errors.ErrUnsupported)
	wantAt(t, get(t, h, "/counts", http.StatusOK), "1", "total") // of the family that counts
	s.errs[v1.IPv6Protocol] = s.errs[v1.IPv4Protocol]
	get(t, h, "/counts", http.StatusNotImplemented)
	s.errs[v1.IPv6Protocol] = errors.New("no kernel")
	get(t, h, "/counts", http.StatusInternalServerError)

	_, recording := webProxy(t)
	get(t, recording, "/counts", http.StatusNotImplemented)
}
