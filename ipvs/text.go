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
		for _, f := range v.flagNames() {
			b.WriteString(" " + f)
		}
		b.WriteByte('\n')
		how := ""
		if v.forward != ForwardMasquerade {
			how = " forwarding " + v.forward.String()
		}
		for _, addr := range slices.SortedFunc(maps.Keys(v.reals), netip.AddrPort.Compare) {
			fmt.Fprintf(&b, "  -> %v weight %d%s\n", addr, v.reals[addr], how)
		}
	}
	return b.String()
}

// flagNames returns the names that ipvsadm has for the flags, except persistence.
func (s settings) flagNames() (names []string) {
	for _, f := range []struct {
		flag uint32
		name string
	}{{flagOnePacket, "ops"}, {flagHashFallback, s.scheduler + "-fallback"}, {flagHashPort, s.scheduler + "-port"}} {
		if s.flags&f.flag != 0 {
			names = append(names, f.name)
		}
	}
	const named = flagPersistent | flagOnePacket | flagHashFallback | flagHashPort
	if rest := s.flags &^ named; rest != 0 {
		names = append(names, fmt.Sprintf("flags %#x", rest))
	}
	return names
}
