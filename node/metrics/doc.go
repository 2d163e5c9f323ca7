// Package metrics measures a proxy with Prometheus. Metrics that kube-proxy has too keep its names,
// labels and meanings, so that dashboards and alerts work as before. All others begin with
// "serviceplane_". Histograms have buckets up to one hour. It is for programs with a registry of
// Prometheus.
//
//	m, err := metrics.New(registry, metrics.Options{Mode: "nftables"})
//	p, err := nftables.New(config, proxier.Deps{Observer: m})
//	m.Watch(metrics.Sources{Status: p.Status})
//
// The number of series does not depend on the number of Services: the labels are the
// IP family, a traffic policy, a status code, the protocol, outcome and direction of a
// connection, and the fixed lists of reasons and conditions. Only
// Options.PerService, which is off by default, changes that, and Sources.Counts, which has a
// limit:
//
//	serviceplane_service_new_connections_total{ip_family,namespace,service,port,protocol}
//	serviceplane_service_refused_connections_total{ip_family,namespace,service,port,protocol}
//	serviceplane_service_traffic_packets_total{ip_family,namespace,service,port,protocol,direction}
//	serviceplane_service_traffic_bytes_total{ip_family,namespace,service,port,protocol,direction}
//	serviceplane_traffic_losses_total
//
// The first one counts each new connection for which the engine has chosen an endpoint, the others
// what passed through connections, to endpoints ("in") and from them ("out"), and how often the
// kernel dropped notifications from which they are counted.
//
// # Connections
//
// With Options.Mode "userspace" there are also metrics of connections. They count
// connections that have ended; a UDP client's flow is one connection.
//
//	serviceplane_connections_total{ip_family,protocol,outcome}
//	serviceplane_connection_bytes_total{ip_family,protocol,direction}
//	serviceplane_connection_retries_total{ip_family,protocol}
//	serviceplane_connection_duration_seconds{ip_family,protocol}
//	serviceplane_connection_held_seconds{ip_family,protocol}
//
// An outcome is a connection.Outcome. A direction is "sent" or "received", from the
// client's view. With Options.PerService there are also:
//
//	serviceplane_service_connections_total{namespace,service,port,protocol,outcome}
//	serviceplane_service_connection_bytes_total{namespace,service,port,protocol,direction}
//
// Engine.Traffic of package userspace counts the open connections.
package metrics
