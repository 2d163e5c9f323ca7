package ipvs

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// mhSlots is the size of the scheduler's table, and mhOffsetKey and mhSkipKey are its keys
// (net/netfilter/ipvs/ip_vs_mh.c).
const (
	mhSlots                = 4093
	mhOffsetKey, mhSkipKey = 2654435761, 2654446892
)

// mhHash is hsiphash of linux/siphash.h on processors with 64 bits: SipHash-1-3 of 4 bytes.
func mhHash(value uint32, key uint64) uint32 {
	a, b, c, d := key^0x736f6d6570736575, key^0x646f72616e646f6d, key^0x6c7967656e657261, key^0x7465646279746573
	mix := func() {
		a, c = a+b, c+d
		b, d = bits.RotateLeft64(b, 13)^a, bits.RotateLeft64(d, 16)^c
		a = bits.RotateLeft64(a, 32)
		c, a = c+b, a+d
		b, d = bits.RotateLeft64(b, 17)^c, bits.RotateLeft64(d, 21)^a
		c = bits.RotateLeft64(c, 32)
	}
	word := uint64(value) | 4<<56
	d ^= word
	mix()
	a ^= word
	c ^= 0xff
	for range 3 {
		mix()
	}
	return uint32(a ^ b ^ c ^ d)
}

// mhTable models the scheduler: real servers take slots in turn, in the order of the list.
func mhTable(reals []netip.AddrPort) []netip.AddrPort {
	slots, taken := make([]netip.AddrPort, mhSlots), 0
	next, skip := make([]uint32, len(reals)), make([]uint32, len(reals))
	for i, r := range reals {
		ip := r.Addr().As4()
		value := binary.BigEndian.Uint32(ip[:]) + uint32(r.Port())
		next[i], skip[i] = mhHash(value, mhOffsetKey)%mhSlots, mhHash(value, mhSkipKey)%(mhSlots-1)+1
	}
	for {
		for i, r := range reals {
			for slots[next[i]].IsValid() {
				next[i] = (next[i] + skip[i]) % mhSlots
			}
			slots[next[i]] = r
			if taken++; taken == mhSlots {
				return slots
			}
		}
	}
}

// A change moves no more slots than doc.go and proxiertest.Features promise.
func TestHistoryChangesFewSlots(t *testing.T) {
	t.Parallel()
	dice := rand.New(rand.NewPCG(1, 2))
	const rounds = 20
	for n, want := range map[int]float64{10: 0.01, 100: 0.06, 1000: 0.3} {
		sum := 0.0
		for range rounds {
			var reals []netip.AddrPort
			for i := range n {
				addr := netip.AddrFrom4([4]byte{10, byte(dice.UintN(256)), byte(i >> 8), byte(i)})
				reals = append(reals, netip.AddrPortFrom(addr, 8080))
			}
			before, differing := mhTable(reals), 0
			dice.Shuffle(n, func(i, j int) { reals[i], reals[j] = reals[j], reals[i] })
			for i, r := range mhTable(reals) {
				if r != before[i] {
					differing++
				}
			}
			share := float64(differing) / mhSlots
			sum += share
			if share == 0 || share > want {
				t.Errorf("%d real servers in another order: %.2f %% of the slots differ, want more than 0 and at most %v %%", n, 100*share, 100*want)
			}
		}
		t.Logf("%d real servers: %.2f %%", n, 100*sum/rounds)
	}
}
