package ipvs

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/serviceplane/serviceplane/desired"
)

// parseProc parses the virtual servers of one IP family in /proc/net/ip_vs. Reading this
// file is one call, while netlink needs a request for each virtual server. The kernel's
// format is (ip_vs_info_seq_show of net/netfilter/ipvs/ip_vs_ctl.c):
//
//	IP Virtual Server version 1.2.1 (size=4096)
//	Prot LocalAddress:Port Scheduler Flags
//	  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
//	TCP  0A600001:0050 rr persistent 75000 FFFFFFFF
//	  -> 0AF40101:1F90      Masq    1      0          0
//
// The only flag is persistence. Its timeout is in a unit of the kernel, and not parsed.
func parseProc(b []byte, isFamily func(netip.Addr) bool) (map[serverKey]*virtual, error) {
	all := map[serverKey]*virtual{}
	var v *virtual // the last one, if it is of the family
	var fields [][]byte
	for line := range bytes.Lines(b) {
		fields = slices.AppendSeq(fields[:0], bytes.FieldsSeq(line))
		var err error
		if len(fields) == 0 || string(fields[0]) != "->" {
			v, err = parseVirtual(all, fields, isFamily)
		} else if v != nil { // not of another family, nor a heading
			err = v.parseReal(fields)
		}
		if err != nil {
			return nil, fmt.Errorf("line %q: %w", bytes.TrimSpace(line), err)
		}
	}
	return all, nil
}

// parseVirtual adds the virtual server of a line. It returns nil for other lines and the
// other IP family.
func parseVirtual(all map[serverKey]*virtual, fields [][]byte, isFamily func(netip.Addr) bool) (*virtual, error) {
	if len(fields) < 3 {
		return nil, nil
	}
	protocol, ok := map[string]desired.Protocol{"TCP": desired.TCP, "UDP": desired.UDP, "SCTP": desired.SCTP}[string(fields[0])]
	if !ok {
		return nil, nil // a heading, or a virtual server for a firewall mark
	}
	addr, err := parseProcAddr(fields[1])
	if err != nil || !isFamily(addr.Addr()) {
		return nil, err
	}
	v := &virtual{settings: settings{scheduler: string(fields[2])}, reals: map[netip.AddrPort]int{}}
	if slices.ContainsFunc(fields[3:], func(f []byte) bool { return string(f) == "persistent" }) {
		v.flags = flagPersistent
	}
	all[keyOf(protocol, addr)] = v
	return v, nil
}

func (v *virtual) parseReal(fields [][]byte) error {
	const forwardField, weightField = 2, 3
	if len(fields) <= weightField {
		return fmt.Errorf("want at least %d fields", weightField+1)
	}
	addr, err := parseProcAddr(fields[1])
	if err != nil {
		return err
	}
	v.forward = methodOf(func(m method) bool { return m.name == string(fields[forwardField]) })
	v.reals[addr], err = strconv.Atoi(string(fields[weightField]))
	return err
}

// parseProcAddr parses 0A600001:0050 or [fd00:0000:…:0001]:0050.
func parseProcAddr(b []byte) (netip.AddrPort, error) {
	var ip netip.Addr
	host := b[:max(bytes.LastIndexByte(b, ':'), 0)]
	raw, err := hex.DecodeString(string(host))
	if err != nil {
		ip, err = netip.ParseAddr(string(bytes.Trim(host, "[]")))
	} else if ip, _ = netip.AddrFromSlice(raw); !ip.Is4() {
		err = fmt.Errorf("%q is not an address", b)
	}
	if err != nil {
		return netip.AddrPort{}, err
	}
	port, err := strconv.ParseUint(string(b[len(host)+1:]), 16, 16)
	return netip.AddrPortFrom(ip, uint16(port)), err
}
