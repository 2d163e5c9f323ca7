package ebpf

import (
	"bytes"
	"testing"
)

// FuzzConnected: what the program find has written is read in whole, or there is an error.
func FuzzConnected(f *testing.F) {
	f.Add(make([]byte, 2*24), false)
	f.Add(make([]byte, 48), true)
	f.Add(make([]byte, 47), true)
	f.Fuzz(func(t *testing.T, b []byte, six bool) {
		addrLen := 4
		if six {
			addrLen = 16
		}
		size := 16 + 2*addrLen
		all, err := parseConnected(b, addrLen)
		if isWhole := len(b)%size == 0; isWhole != (err == nil) || isWhole && len(all) != len(b)/size {
			t.Errorf("%d sockets in %d bytes, %v; want one for each %d", len(all), len(b), err, size)
		}
	})
}

// FuzzFlowKey: a key of the kernel that was read is written as it was.
func FuzzFlowKey(f *testing.F) {
	f.Add([]byte("\x0a\xf4\x00\x01\x1f\x90\x75\x30\x06\x00\x00\x00"))
	f.Add(append(make([]byte, 16), "\x1f\x90\x75\x30\x11\x00\x00\x00"...))
	f.Fuzz(func(t *testing.T, b []byte) {
		const padding = 3
		if len(b) != 12 && len(b) != 24 { // the sizes of the maps' keys
			return
		}
		if got := parseFlowKey(b).bytes(); !bytes.Equal(got[:len(got)-padding], b[:len(b)-padding]) {
			t.Errorf("key %x is written as %x", b, got)
		}
	})
}
