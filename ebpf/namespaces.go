package ebpf

import "sync"

// Namespaces are network namespaces in which the rules translate and sockets do not, or with Only the
// only ones in which sockets translate. The zero value has none. It may be changed at any time, by
// several goroutines; instances that use it follow at once. What an earlier process had listed is
// forgotten at the first sync, so Add those that exist before it. There is room for 65,536.
type Namespaces struct {
	// Only turns the meaning round. Do not change it later.
	Only bool

	mu    sync.Mutex        // guards all below
	names map[string]uint64 // the number of each network namespace
	users map[cookies]bool
}

// cookies is the list in the kernel of one IP family of an instance: a map of numbers.
type cookies interface {
	Put(key, value any) error
	Delete(key any) error
}
