package metrics

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type clientRequests struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// requestDurations are the buckets of component-base, metrics/prometheus/restclient.
var requestDurations = []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60} // read-only

// NewClientRequests measures the requests of a client of the API server, under the names that client-go's requests
// have in Kubernetes' components:
//
//	rest_client_requests_total{code,method,host}
//	rest_client_request_duration_seconds{verb,host}
//
// Pass wrap to rest.Config.Wrap, after informer.Link.Attach, so that the time counts that Link lets a request take.
// client-go itself has hooks for one registry in a process; wrap is for the clients that get it. Several goroutines
// may use it at once.
//
// NewClientRequests fails if the registerer has the collectors already, for example because the program uses
// component-base: then use its registry for those alone.
func NewClientRequests(registerer prometheus.Registerer) (wrap func(next http.RoundTripper) http.RoundTripper, err error) {
	c := &clientRequests{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "rest_client_requests_total", Help: "Requests to the API server by status code, method and host; the code is <error> without a response.",
		}, []string{labelCode, "method", "host"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "rest_client_request_duration_seconds", Help: "Time until the API server responded, by verb and host, without watches.", Buckets: requestDurations,
		}, []string{"verb", "host"}),
	}
	if err := register(registerer, []prometheus.Collector{c.requests, c.duration}); err != nil {
		return nil, err
	}
	return func(next http.RoundTripper) http.RoundTripper { return &measured{c, next} }, nil
}

// measured implements http.RoundTripper.
type measured struct {
	client *clientRequests
	next   http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (m *measured) RoundTrip(r *http.Request) (*http.Response, error) {
	began := time.Now()
	response, err := m.next.RoundTrip(r)
	code := "<error>"
	if err == nil {
		code = strconv.Itoa(response.StatusCode)
	}
	m.client.requests.WithLabelValues(code, r.Method, r.URL.Host).Inc()
	if watch := r.URL.Query().Get("watch"); watch == "" || watch == "false" || watch == "0" {
		m.client.duration.WithLabelValues(r.Method, r.URL.Host).Observe(time.Since(began).Seconds())
	}
	return response, err
}

// WrappedRoundTripper implements k8s.io/apimachinery/pkg/util/net.RoundTripperWrapper, by
// which client-go finds the transport, for example to close idle connections.
func (m *measured) WrappedRoundTripper() http.RoundTripper { return m.next }
