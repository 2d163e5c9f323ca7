package userspace

import (
	"bufio"
	"bytes"
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
		if addr, ok := parseSocket(lines.Bytes(), protocol); ok {
			found[listener{protocol, addr}] = true
		}
	}
	return lines.Err()
}

// parseSocket returns the local address of a line, if the socket accepts clients. Most lines are those
// of connections, and cost no memory.
func parseSocket(line []byte, protocol desired.Protocol) (addr netip.AddrPort, ok bool) {
	state := "0A" // TCP_LISTEN
	if protocol == desired.UDP {
		state = "07" // TCP_CLOSE: not connected
	}
	var fields [4][]byte // number, local address, remote address, state
	i := 0
	for field := range bytes.FieldsSeq(line) {
		fields[i] = field
		if i++; i == len(fields) {
			break
		}
	}
	if string(fields[3]) != state {
		return addr, false
	}
	address, port, _ := strings.Cut(string(fields[1]), ":")
	raw, err := hex.DecodeString(address)
	if err != nil || len(raw)%4 != 0 {
		return addr, false
	}
	for i := 0; i < len(raw); i += 4 { // words in the byte order of the machine
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	ip, valid := netip.AddrFromSlice(raw)
	n, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(ip, uint16(n)), valid && err == nil
}
