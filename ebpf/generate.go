package ebpf

//go:generate ../hack/ebpf.sh
