// Package metrics measures a proxy with Prometheus. What kube-proxy measures too
// has its names, labels and meanings, so that dashboards and alerts go on working;
// the rest begins with "serviceplane_". Histograms reach one hour.
//
//	m, err := metrics.New(registry, metrics.Options{Mode: "nftables"})
//	p, err := nftables.New(config, proxier.Deps{Observer: m})
//	m.Watch(p.Status)
//
// No label depends on the number of Services: the labels are the IP family, a
// traffic policy, a status code, and the fixed lists of reasons and conditions.
package metrics
