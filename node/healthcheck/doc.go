// Package healthcheck answers health checks of load balancers and kubelets. It is for programs that
// serve /healthz themselves; the node ports of health checks come with package nodedeps.
//
// NewNodePortServer makes a proxier.Health: it listens on the health check node port of every
// Service that has one, and reports to load balancers how many endpoints of the Service are
// on this node. One Health serves both IP families: an IPv4 Service is also answered for at
// the node's IPv6 addresses. It recovers by itself when addresses
// are added or removed, ports are in use for a while, or the process runs out of file
// descriptors; while a fault lasts, it is a proxier.Condition.
//
// NewHandler answers at /healthz and /livez about the proxy as a whole. Evaluate is the
// decision behind both, a pure function of proxier.Status: a proxy is healthy if every
// family has been programmed once and no change waits too long.
//
// Server is an HTTP server for such handlers. It retries until it can listen on its
// address, and slow clients cannot block it.
//
// The Health listens in the network namespace of the process. A program that proxies for
// another network namespace injects Listen and Addresses. The package builds on all
// platforms.
package healthcheck
