// Package decide is a study of a layer that the ebpf engine does not have: a BPF program that makes the
// conntrack entry of each new flow to a Service, so that the rules of the node need not know Services.
// docs/PERFORMANCE.md has what it showed. Nothing uses the package but its own benchmark.
package decide
