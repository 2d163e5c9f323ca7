// Package bpftest makes what BPF programs need, for a test alone. On other systems than Linux it is empty.
package bpftest
