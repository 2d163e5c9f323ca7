// Package healthcheck answers those who ask whether a node should get traffic.
//
// NodePorts is a proxier.Health: it listens at the health check node port of every
// Service that has one, and tells load balancers how many endpoints of it are on
// this node. One NodePorts serves both IP families. It mends what it can by itself:
// addresses that come and go, ports that are busy for a while, a process that is
// out of file descriptors; what lasts is a proxier.Condition.
//
// NewHandler answers kubelets and load balancers about the proxy as a whole, at
// /healthz and /livez. Judge is the judgement behind both, a pure function of
// proxier.Status: a proxy is healthy when every family has been programmed once and
// no change waits too long.
//
// Server is an HTTP server for such handlers. It does not give up its address, and
// no client can tie it up.
//
// NodePorts listens where the embedding program is. One that programs another
// network namespace injects Listen and Addresses. The package builds everywhere.
package healthcheck
