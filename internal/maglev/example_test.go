package maglev_test

import (
	"fmt"
	"net/netip"

	"github.com/serviceplane/serviceplane/internal/maglev"
)

// A client's hash selects a slot, and the slot an endpoint. If an endpoint goes, the others keep almost all slots.
func ExampleTable() {
	var endpoints []netip.AddrPort
	for i := range byte(4) {
		endpoints = append(endpoints, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 1, 1 + i}), 8080))
	}
	const most = 1021 // slots
	all := maglev.Table(endpoints, nil, most)
	fewer := maglev.Table(endpoints[:3], nil, most)
	lost, moved := 0, 0
	for slot, endpoint := range all {
		switch {
		case endpoint == 3:
			lost++
		case fewer[slot] != endpoint:
			moved++
		}
	}
	fmt.Printf("of %d slots, %d lost their endpoint, and %d others changed\n", len(all), lost, moved)
	// Output: of 1021 slots, 255 lost their endpoint, and 12 others changed
}
