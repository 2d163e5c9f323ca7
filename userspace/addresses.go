package userspace

import (
	"context"
	"fmt"
	"net/netip"
)

// Addresses puts VIPs on this machine, so that sockets can listen on them. Calls for one
// IP family do not overlap, but those for both may. Both methods do nothing, without an
// error, when there is nothing to do.
//
// A VIP goes with its last socket; connections that drain there have no way any more.
//
// NewNetsh makes one for Windows. On Linux it would add them to a dummy device, as
// "ip address add" does.
type Addresses interface {
	// Add makes an address one of this machine's, and returns when sockets can be
	// bound to it.
	Add(ctx context.Context, addr netip.Addr) error
	// Remove takes back an address that Add has added.
	Remove(ctx context.Context, addr netip.Addr) error
}

// addressBook counts the sockets on each address that was added: other ports of a
// VIP may still be in use when one goes (W-U6).
type addressBook struct {
	addresses Addresses // nil: there is nothing to add
	sockets   map[netip.Addr]int
}

// use adds an address for one more socket.
func (b *addressBook) use(ctx context.Context, addr netip.Addr) error {
	if b.addresses == nil || addr.IsUnspecified() {
		return nil
	}
	if b.sockets[addr] == 0 {
		if err := b.addresses.Add(ctx, addr); err != nil {
			return fmt.Errorf("add address %v: %w", addr, err)
		}
	}
	b.sockets[addr]++
	return nil
}

// leave removes an address when its last socket has gone.
func (b *addressBook) leave(ctx context.Context, addr netip.Addr) error {
	if b.addresses == nil || addr.IsUnspecified() {
		return nil
	}
	if b.sockets[addr]--; b.sockets[addr] > 0 {
		return nil
	}
	delete(b.sockets, addr)
	if err := b.addresses.Remove(ctx, addr); err != nil {
		return fmt.Errorf("remove address %v: %w", addr, err)
	}
	return nil
}
