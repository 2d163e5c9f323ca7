// Package metrics measures a proxy with Prometheus. What kube-proxy measures too
// has its names, labels and meanings, so that dashboards and alerts go on working;
// the rest begins with "serviceplane_". Histograms reach one hour. It builds
// everywhere, and is the only package that needs client_golang.
//
//	m, err := metrics.New(registry, metrics.Options{Mode: "nftables"})
//	p, err := nftables.New(config, proxier.Deps{Observer: m})
//	m.Watch(p.Status)
//
// No label depends on the number of Services: the labels are the IP family, a
// traffic policy, a status code, the protocol, outcome and direction of a
// connection, and the fixed lists of reasons and conditions. Only
// Options.PerService, which is off by default, changes that.
//
// # Connections
//
// The userspace engine takes part in connections itself, so Options.Mode
// "userspace" also has these. All count what has ended, a UDP client's flow as one
// connection.
//
//	serviceplane_connections_total{ip_family,protocol,outcome}
//	serviceplane_connection_bytes_total{ip_family,protocol,direction}
//	serviceplane_connection_retries_total{ip_family,protocol}
//	serviceplane_connection_duration_seconds{ip_family,protocol}
//	serviceplane_connection_held_seconds{ip_family,protocol}
//
// An outcome is a connection.Outcome, and a direction is "sent" or "received", as the
// client sees it. With Options.PerService there are too:
//
//	serviceplane_service_connections_total{namespace,service,port,protocol,outcome}
//	serviceplane_service_connection_bytes_total{namespace,service,port,protocol,direction}
//
// How many are open at the moment, Engine.Traffic of package userspace tells.
package metrics
