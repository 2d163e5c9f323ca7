package main

import (
	"context"
	"io"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/debughttp"
	"github.com/serviceplane/serviceplane/healthcheck"
	"github.com/serviceplane/serviceplane/metrics"
	"github.com/serviceplane/serviceplane/proxier"
)

// kube-proxy's ports.
const (
	healthzPort = 10256
	metricsPort = 10249
)

// threshold is how long a change may wait to be programmed.
func (o *options) threshold() time.Duration { return 2 * o.tuned().syncPeriod }

// servers are those of health, of metrics, and of the page that shows everything.
func (o *options) servers(p *proxier.Proxier, m *metrics.Metrics, registry *prometheus.Registry, log *zap.Logger) []task {
	health := healthcheck.NewHandler(p.Status, healthcheck.HandlerOptions{Threshold: o.threshold(), Answered: m.ObserveHealth})
	var tasks []task
	serve := func(name, text string, port uint16, handler http.Handler) {
		if address, _ := bindAddress(text, port); address != "" {
			s := &healthcheck.Server{Name: name, Address: address, Handler: handler, Logger: log}
			tasks = append(tasks, task{name + " server", s.Run})
		}
	}
	serve("health", o.healthzAddress, healthzPort, health)
	serve("metrics", o.metricsAddress, metricsPort, o.metricsPages(registry))
	serve("debug", o.debugAddress, 0, debughttp.Handler(p, debughttp.Title("nodeproxy"), debughttp.Hosts(o.allowedHosts...)))
	return tasks
}

// metricsPages are those of kube-proxy's metrics server (HC-40). Health is for
// everybody: a load balancer may ask by any name.
func (o *options) metricsPages(registry *prometheus.Registry) http.Handler {
	public, mux := http.NewServeMux(), http.NewServeMux()
	public.HandleFunc("/healthz", saying("ok"))
	public.Handle("/", debughttp.KnownHosts(mux, o.allowedHosts...))
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/proxyMode", saying(string(o.mode())))
	mux.HandleFunc("/configz", o.configz)
	if o.profiling {
		mux.HandleFunc("/debug/pprof/", patient(pprof.Index))
		mux.HandleFunc("/debug/pprof/cmdline", patient(pprof.Cmdline))
		mux.HandleFunc("/debug/pprof/profile", patient(pprof.Profile))
		mux.HandleFunc("/debug/pprof/symbol", patient(pprof.Symbol))
		mux.HandleFunc("/debug/pprof/trace", patient(pprof.Trace))
	}
	return public
}

// saying answers with a text.
func saying(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = io.WriteString(w, text) // the client may have gone
	}
}

// longestProfile is how long a profile may take.
const longestProfile = 5 * time.Minute

// patient lets an answer take longer than the server allows. Package pprof would
// refuse to try, so it must not find the server.
func patient(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(longestProfile)) // or it is cut short
		h(w, r.WithContext(context.WithValue(r.Context(), http.ServerContextKey, nil)))
	}
}
