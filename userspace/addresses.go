package userspace

import (
	"context"
	"fmt"
	"net/netip"
)

// Addresses assigns VIPs to this machine, so that sockets can listen on them. Calls for
// one IP family do not overlap, but calls for different families may. Adding an address
// that is present, and removing one that is absent, is not an error.
//
// The engine removes a VIP together with its last socket; connections that still drain
// on the VIP then break.
//
// NewNetsh implements Addresses on Windows. On Linux, an implementation adds VIPs to a
// dummy device, as "ip address add" does.
type Addresses interface {
	// Add assigns an address to this machine. It returns when sockets can be bound to
	// the address.
	Add(ctx context.Context, addr netip.Addr) error
	// Remove removes an address that Add has added.
	Remove(ctx context.Context, addr netip.Addr) error
}

// addressRefs counts the sockets on each address: when one socket closes, other ports
// of the VIP may still be open (W-U6).
type addressRefs struct {
	addresses Addresses // nil: the addresses are not managed
	sockets   map[netip.Addr]int
}

// acquire counts one more socket on an address, and adds the address for the first one.
func (r *addressRefs) acquire(ctx context.Context, addr netip.Addr) error {
	if r.addresses == nil || addr.IsUnspecified() {
		return nil
	}
	if r.sockets[addr] == 0 {
		if err := r.addresses.Add(ctx, addr); err != nil {
			return fmt.Errorf("add address %v: %w", addr, err)
		}
	}
	r.sockets[addr]++
	return nil
}

// release counts one socket less on an address, and removes the address after the last
// one.
func (r *addressRefs) release(ctx context.Context, addr netip.Addr) error {
	if r.addresses == nil || addr.IsUnspecified() {
		return nil
	}
	if r.sockets[addr]--; r.sockets[addr] > 0 {
		return nil
	}
	delete(r.sockets, addr)
	if err := r.addresses.Remove(ctx, addr); err != nil {
		return fmt.Errorf("remove address %v: %w", addr, err)
	}
	return nil
}
