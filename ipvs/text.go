package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// text prints virtual servers in a format like that of ipvsadm.
func text(all map[serverKey]*virtual) string {
	var b strings.Builder
	for _, key := range slices.SortedFunc(maps.Keys(all), compareKeys) {
		v := all[key]
		fmt.Fprintf(&b, "%v %s", key, v.scheduler)
		if v.flags&flagPersistent != 0 {
			fmt.Fprintf(&b, " persistent %v", v.timeout)
		}
		if rest := v.flags &^ flagPersistent; rest != 0 {
			fmt.Fprintf(&b, " flags %#x", rest)
		}
		b.WriteByte('\n')
		for _, addr := range slices.SortedFunc(maps.Keys(v.reals), netip.AddrPort.Compare) {
			fmt.Fprintf(&b, "  -> %v weight %d\n", addr, v.reals[addr])
		}
	}
	return b.String()
}
