package metrics_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// Some metrics after the first sync.
func Example() {
	registry := prometheus.NewRegistry()
	families := []v1.IPFamily{v1.IPv4Protocol}
	m, err := metrics.New(registry, metrics.Options{Mode: "nftables", Families: families})
	if err != nil {
		fmt.Println(err)
		return
	}
	engines := map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}}
	p, err := proxier.New(proxier.Config{Families: families}, proxier.Deps{Observer: m}, engines) // or nftables.New
	if err != nil {
		fmt.Println(err)
		return
	}
	m.Watch(metrics.Sources{Status: p.Status})
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	fmt.Println("sync:", p.Sync(ctx))
	stop()
	fmt.Println("run:", <-ended)

	scrape := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(scrape, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(scrape.Body.String()) {
		switch name, _, _ := strings.Cut(line, "{"); name {
		case "kubeproxy_sync_full_proxy_rules_duration_seconds_count", "kubeproxy_sync_proxy_rules_nftables_sync_failures_total", "serviceplane_service_ports":
			fmt.Print(line)
		}
	}
	// Output:
	// sync: <nil>
	// run: <nil>
	// kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1
	// kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 0
	// serviceplane_service_ports{ip_family="IPv4"} 1
}
