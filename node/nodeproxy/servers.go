package nodeproxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/pprof"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/node/programmed"
)

// kube-proxy's ports.
const (
	healthzPort = 10256
	metricsPort = 10249
)

// threshold is how long a change may be pending before the proxy is unhealthy.
func (o *options) threshold() time.Duration { return 2 * o.tuned().syncPeriod }

// servers returns the health, metrics and debug servers.
func (o *options) servers(node string, p *testedProxy, m *measured, log *zap.Logger) []task {
	health := http.NewServeMux()
	health.Handle("/", healthcheck.NewHandler(p.Status, healthcheck.HandlerOptions{
		Threshold: o.threshold(), Answered: m.ObserveHealth, UnhealthyConditions: o.canary.unhealthy(),
	}))
	health.Handle("/programmed", programmed.Handler(node, p))
	var tasks []task
	serve := func(name, text string, port uint16, handler http.Handler) {
		if address, _ := bindAddress(text, port); address != "" {
			s := &healthcheck.Server{Name: name, Address: address, Handler: handler, Logger: log}
			tasks = append(tasks, task{name + " server", o.runServer(s)})
		}
	}
	serve("health", o.healthzAddress, healthzPort, health)
	serve("metrics", o.metricsAddress, metricsPort, o.metricsPages(m.registry))
	about := []debughttp.Option{debughttp.Title("nodeproxy"), debughttp.Version(version())}
	serve("debug", o.debugAddress, 0, debughttp.Handler(p, append(about, debughttp.Hosts(o.allowedHosts...))...))
	return append(tasks, o.socketServer(debughttp.Handler(p, o.socketOptions(p, about)...), log)...)
}

// runServer returns the function that runs a server. With --bind-address-hard-fail, it ends
// with the first failure to listen (HC-32).
func (o *options) runServer(s *healthcheck.Server) func(context.Context) error {
	if !o.kubeProxy.hardFail {
		return s.Run
	}
	return func(ctx context.Context) error {
		trying, stop := context.WithCancelCause(ctx)
		defer stop(nil)
		s.Listen = func(ctx context.Context, network, address string) (net.Listener, error) {
			l, err := new(net.ListenConfig).Listen(ctx, network, address)
			if err != nil && ctx.Err() == nil {
				stop(fmt.Errorf("%w (--bind-address-hard-fail)", err))
			}
			return l, err
		}
		if err := s.Run(trying); err != nil || ctx.Err() != nil {
			return err
		}
		return context.Cause(trying)
	}
}

// metricsPages has the paths of kube-proxy's metrics server (HC-40). /healthz accepts any
// host name, for load balancers.
func (o *options) metricsPages(registry *prometheus.Registry) http.Handler {
	public, mux := http.NewServeMux(), http.NewServeMux()
	public.HandleFunc("/healthz", textHandler("ok"))
	public.Handle("/", debughttp.KnownHosts(mux, o.allowedHosts...))
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/proxyMode", textHandler(string(o.mode())))
	mux.HandleFunc("/configz", o.configz)
	paths := []string{"/configz", "/healthz", "/metrics", "/proxyMode"}
	if o.kubeProxy.gates.enabled(gateFlagz) {
		mux.Handle("/flagz", o.flagz())
		paths = append(paths, "/flagz")
	}
	if o.profiling {
		paths = append(paths, "/debug")
		mux.HandleFunc("/debug/pprof/", extended(pprof.Index))
		mux.HandleFunc("/debug/pprof/cmdline", extended(pprof.Cmdline))
		mux.HandleFunc("/debug/pprof/profile", extended(pprof.Profile))
		mux.HandleFunc("/debug/pprof/symbol", extended(pprof.Symbol))
		mux.HandleFunc("/debug/pprof/trace", extended(pprof.Trace))
	}
	if o.kubeProxy.gates.enabled(gateStatusz) {
		slices.Sort(paths)
		mux.Handle("/statusz", statusz(time.Now(), paths))
	}
	return public
}

// textHandler responds with a text.
func textHandler(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = io.WriteString(w, text) // the client may be gone
	}
}

// profileTimeout bounds the duration of a profile.
const profileTimeout = 5 * time.Minute

// extended extends the write timeout of the server for a profile. Package pprof compares
// the duration with the timeout of the server in the context, so the context has none.
func extended(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(profileTimeout)) // on an error, the profile is cut short
		h(w, r.WithContext(context.WithValue(r.Context(), http.ServerContextKey, nil)))
	}
}
