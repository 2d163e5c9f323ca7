package userspace

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
)

// listening reads which sockets of a network namespace accept clients.
func listening(netNS string, family v1.IPFamily) (map[listener]bool, error) {
	found := map[listener]bool{}
	suffix := ""
	if family == v1.IPv6Protocol {
		suffix = "6"
	}
	err := namespace.Visit(netNS, func() error {
		for protocol, file := range map[desired.Protocol]string{desired.TCP: "tcp", desired.UDP: "udp"} {
			if err := readSockets("/proc/thread-self/net/"+file+suffix, protocol, found); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list sockets: %w", err)
	}
	return found, nil
}

// readSockets adds those of a file that accept clients.
func readSockets(path string, protocol desired.Protocol, found map[listener]bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(file)
	lines.Scan() // the heading
	for lines.Scan() {
		if addr, ok := parseSocket(lines.Text(), protocol); ok {
			found[listener{protocol, addr}] = true
		}
	}
	return lines.Err()
}

// parseSocket returns the local address of a line, if the socket accepts clients.
func parseSocket(line string, protocol desired.Protocol) (addr netip.AddrPort, ok bool) {
	const listens, unconnected = "0A", "07" // of TCP and of UDP: TCP_LISTEN, TCP_CLOSE
	fields := strings.Fields(line)          // number, local address, remote address, state
	if len(fields) < 4 || fields[3] != map[desired.Protocol]string{desired.TCP: listens, desired.UDP: unconnected}[protocol] {
		return addr, false
	}
	address, port, _ := strings.Cut(fields[1], ":")
	bytes, err := hex.DecodeString(address)
	if err != nil || len(bytes)%4 != 0 {
		return addr, false
	}
	for i := 0; i < len(bytes); i += 4 { // words in the byte order of the machine
		binary.NativeEndian.PutUint32(bytes[i:], binary.BigEndian.Uint32(bytes[i:]))
	}
	ip, valid := netip.AddrFromSlice(bytes)
	n, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(ip, uint16(n)), valid && err == nil
}
