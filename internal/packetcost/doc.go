// Package packetcost measures what packets pay for a Service: through the engines, through the
// rules that kube-proxy makes, and through nothing. It has benchmarks only.
package packetcost
