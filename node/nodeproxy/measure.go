package nodeproxy

import (
	"net/http"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier"
)

// measured holds what /metrics shows.
type measured struct {
	*metrics.Metrics

	registry *prometheus.Registry
	// client measures the requests of a client of the API server.
	client  func(next http.RoundTripper) http.RoundTripper
	sources metrics.Sources
}

// measure returns the metrics of the mode, the client, the process and the build.
func (o *options) measure() (*measured, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), buildInfo())
	m, err := metrics.New(registry, metrics.Options{Mode: string(o.mode())})
	if err != nil {
		return nil, err
	}
	client, err := metrics.NewClientRequests(registry)
	if err != nil {
		return nil, err
	}
	return &measured{Metrics: m, registry: registry, client: client}, nil
}

// watch shows the status of a proxy, the results of its canary, and of what observes it.
func (m *measured) watch(o *options, p *testedProxy, by *observed, config proxier.Config) {
	m.sources = metrics.Sources{Status: p.Status}
	if p.canary != nil {
		m.sources.Canary = p.canary.Status
	}
	if by.health != nil {
		m.sources.EndpointHealth = by.health.Status
	}
	if by.balancer != nil {
		m.sources.LeastConnections = by.balancer.Readings
	}
	if o.countConnections || o.countTraffic {
		m.sources.Counts = p.Counts
	}
	if o.mode() == modeEBPF {
		m.sources.Sockets = o.engines.counts
		if len(o.ebpf.forwardDevices) > 0 {
			m.sources.Forwarded = o.engines.forwarded
		}
	}
	if o.mode() == modeIPTables { // the kernel counts
		packets := iptables.NewCounters(o.iptablesConfig(config))
		m.sources.LocalhostNodePorts, m.sources.Invalid = packets.LocalhostNodePorts, packets.Invalid
	}
	m.Watch(m.sources)
}

const modulePath = "github.com/serviceplane/serviceplane/node/nodeproxy"

// buildSetting returns a setting of the build, such as "vcs.revision"; "" if it is unknown, or
// the setting of another module, which has this one as a part.
func buildSetting(key string) string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Path == modulePath {
		for _, s := range info.Settings {
			if s.Key == key {
				return s.Value
			}
		}
	}
	return ""
}

// buildVersion returns the version of the module.
func buildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			if m.Path == modulePath && m.Version != "" {
				return m.Version
			}
		}
	}
	return "(unknown)"
}

// buildInfo is the metric kubernetes_build_info of Kubernetes' components. Its version is
// that of nodeproxy.
func buildInfo() prometheus.Collector {
	major, rest, _ := strings.Cut(strings.TrimPrefix(buildVersion(), "v"), ".")
	minor, _, ok := strings.Cut(rest, ".")
	if !ok {
		major, minor = "", ""
	}
	tree := map[string]string{"true": "dirty", "false": "clean"}[buildSetting("vcs.modified")]
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kubernetes_build_info", Help: "Always 1; its labels are the version of nodeproxy.",
		ConstLabels: prometheus.Labels{
			"major": major, "minor": minor, "git_version": buildVersion(), "git_commit": buildSetting("vcs.revision"), "git_tree_state": tree,
			"build_date": buildSetting("vcs.time"), "go_version": runtime.Version(), "compiler": runtime.Compiler, "platform": runtime.GOOS + "/" + runtime.GOARCH,
		},
	})
	info.Set(1)
	return info
}

// version returns the module's version, the revision and the version of Go.
func version() string {
	built := buildVersion()
	if revision := buildSetting("vcs.revision"); revision != "" {
		built += " " + revision
	}
	return built + " " + runtime.Version()
}
