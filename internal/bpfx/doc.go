// Package bpfx closes BPF objects, so that none is closed twice.
package bpfx
