package ebpf

// SocketCounts counts the sockets of an IP family that have connected, or sent a first datagram, to an address
// of Carried frontends, since the programs were attached for the first time, also by an earlier process.
type SocketCounts struct {
	// Translated sockets go to an endpoint.
	Translated uint64
	// Namespace, Bound, Empty and NoMemory are those that were left to the rules: in a network
	// namespace that Sockets.Namespaces excludes; sockets of the node that are bound to an address;
	// during a change; and because the kernel had no memory to remember the VIP.
	Namespace, Bound, Empty, NoMemory uint64
	// Ended are connected UDP sockets that this process has ended, because their endpoint was gone.
	Ended uint64
}
