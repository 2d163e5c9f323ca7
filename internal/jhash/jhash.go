// Package jhash computes the kernel's hash of a packet's source, as the expression "jhash" of
// nf_tables does, so that engines choose the same endpoint.
//
// Source: include/linux/jhash.h (Bob Jenkins' lookup3) and net/netfilter/nft_hash.c.
package jhash

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// Seed is the seed of all hashes of sources. It must never change: during an upgrade, nodes of
// two versions have to agree.
const Seed uint32 = 0x5eed5eed

// Source returns the index of the slot, of so many, for a client: by its address, and by its
// port unless that is 0.
func Source(client netip.AddrPort, slots int) int {
	var key [20]byte
	n := copy(key[:], client.Addr().AsSlice())
	if client.Port() != 0 {
		binary.BigEndian.PutUint16(key[n:], client.Port())
		n += 4 // a register
	}
	return int(uint64(sum(key[:n], Seed)) * uint64(slots) >> 32)
}

// sum hashes a key whose length is a multiple of 4, and at least that.
func sum(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	for ; len(key) > 12; key = key[12:] {
		a += binary.NativeEndian.Uint32(key)
		b += binary.NativeEndian.Uint32(key[4:])
		c += binary.NativeEndian.Uint32(key[8:])
		a, b, c = mix(a, b, c)
	}
	for i, part := range []*uint32{&a, &b, &c}[:len(key)/4] {
		*part += binary.LittleEndian.Uint32(key[4*i:])
	}
	return final(a, b, c)
}

func mix(a, b, c uint32) (uint32, uint32, uint32) {
	for _, by := range [...]int{4, 6, 8, 16, 19, 4} {
		a = (a - c) ^ bits.RotateLeft32(c, by)
		c += b
		a, b, c = b, c, a // the next round begins with b
	}
	return a, b, c
}

func final(a, b, c uint32) uint32 {
	for _, by := range [...]int{14, 11, 25, 16, 4, 14, 24} {
		c = (c ^ b) - bits.RotateLeft32(b, by)
		a, b, c = b, c, a // the next round begins with a
	}
	return b
}
