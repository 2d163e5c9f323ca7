// Package conntrack deletes stale flows: conntrack entries that send a client to an endpoint that
// its Service does not have any more. Engines for the kernel take it through package nodedeps; a
// program with a data plane of its own that uses conntrack calls it itself.
//
// A UDP client that keeps sending keeps its conntrack entry alive, and with it the endpoint
// that was chosen for its first datagram. This is wrong after the endpoint or the Service was
// deleted, and if the client sent its first datagram before the Service had endpoints.
// New has what decides which entries are stale, given the current Services, and deletes them over netlink. TCP
// connections end by themselves.
//
// Valid entries are not deleted: endpoints that terminate but still serve keep their
// flows. Changes of traffic policy or topology affect new connections only.
//
// ReportConnections watches how connections through Services end, for package endpointhealth. OpenConnections lists the
// open ones, for package leastconnections.
//
// NewSysctls sets the limits of connection tracking, as kube-proxy does. The package builds on all platforms, and
// works on Linux only.
package conntrack
