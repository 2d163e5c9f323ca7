package ipvs

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

// The format of Linux 6.1, with trailing spaces.
const procText = `IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
UDP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0035 wlc 
  -> [fd01:0000:0000:0000:0000:0000:0000:000a]:14E9      Masq    1      0          0         
TCP  0A600001:0050 rr  persistent 75000 FFFFFFFF
  -> 0AF40101:1F90      Masq    3      12         0         
  -> 0AF40102:1F90      Local   0      0          0         
FWM  00000007 wlc 
  -> 0AF40103:1F90      Masq    1      0          0         
UDP  0A600003:0035 wlc ops  
SCTP 0A600004:0035 mh  
`

func TestParseProc(t *testing.T) {
	t.Parallel()
	for want, isFamily := range map[string]func(netip.Addr) bool{
		`10.96.0.1:80/TCP rr persistent 0s
  -> 10.244.1.1:8080 weight 3
  -> 10.244.1.2:8080 weight 0
10.96.0.3:53/UDP wlc
10.96.0.4:53/SCTP mh
`: netip.Addr.Is4,
		`[fd00::1]:53/UDP wlc
  -> [fd01::a]:5353 weight 1
`: netip.Addr.Is6,
	} {
		all, err := parseProc([]byte(procText), isFamily)
		if got := text(all); err != nil || got != want {
			t.Errorf("parseProc = %v\n%swant\n%s", err, got, want)
		}
	}
}

// TestParseProcErrors: a malformed line is an error, not a missing server.
func TestParseProcErrors(t *testing.T) {
	t.Parallel()
	const virtual = "TCP  0A600001:0050 rr \n"
	for _, line := range []string{
		"TCP  nonsense rr", "TCP  0A600001 rr", "TCP  0A600001:10500 rr", "TCP  0A6001:0050 rr", "TCP  [fd00::g]:0050 rr", "TCP  :0050 rr",
		virtual + "  -> 0AF40101:1F90      Masq", virtual + "  -> 0AF40101:1F90      Masq many 0 0", virtual + "  -> 0AF40101      Masq 1 0 0",
	} {
		if all, err := parseProc([]byte(line+"\n"), netip.Addr.Is4); err == nil || !strings.Contains(err.Error(), "line") {
			t.Errorf("parseProc(%q) = %v, %v, want an error that quotes the line", line, all, err)
		}
	}
}

// FuzzParseProc: what was parsed, printed as the kernel prints it, is parsed as the same.
func FuzzParseProc(f *testing.F) {
	f.Add([]byte(procText))
	f.Add([]byte("TCP  0A600001:0050 rr \n  -> 0AF40101:1F90      Masq    -1      0          0\nTCP 0A600001:0050 wlc"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, isFamily := range []func(netip.Addr) bool{netip.Addr.Is4, netip.Addr.Is6} {
			first, err := parseProc(b, isFamily)
			if err != nil {
				continue
			}
			second, err := parseProc(printProc(first), isFamily)
			if got, want := text(second), text(first); err != nil || got != want {
				t.Errorf("parseProc = %v\n%swant\n%s", err, got, want)
			}
		}
	})
}

func printProc(all map[serverKey]*virtual) (b []byte) {
	for key, v := range all {
		flags := map[bool]string{true: "persistent 75000 FFFFFFFF"}[v.flags == flagPersistent]
		b = fmt.Appendf(b, "%s  %s %s %s\n", key.Protocol, procAddr(netip.AddrPortFrom(key.VIP, key.Port)), v.scheduler, flags)
		for addr, weight := range v.reals {
			b = fmt.Appendf(b, "  -> %s      Masq    %d      0          0\n", procAddr(addr), weight)
		}
	}
	return b
}

func procAddr(a netip.AddrPort) string {
	if a.Addr().Is4() {
		return fmt.Sprintf("%X:%04X", a.Addr().AsSlice(), a.Port())
	}
	return fmt.Sprintf("[%s]:%04X", a.Addr().StringExpanded(), a.Port())
}
