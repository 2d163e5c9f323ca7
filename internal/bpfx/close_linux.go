package bpfx

import (
	"io"
	"runtime"

	"github.com/cilium/ebpf"
)

// Close closes a map, a program or a link. The library also closes what nobody can reach any more, by the number of
// its descriptor, and does not keep an object reachable while it closes it: without the reference that is kept here, a
// garbage collection at that moment could close the number twice, when it already is another descriptor's.
func Close(object io.Closer) error {
	err := object.Close()
	runtime.KeepAlive(object)
	return err
}

// CloseCollection closes all that a collection has, as Close does.
func CloseCollection(c *ebpf.Collection) {
	c.Close() //nolint:forbidigo // the one place
	runtime.KeepAlive(c)
}
