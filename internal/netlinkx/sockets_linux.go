package netlinkx

import (
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net/netip"

	"golang.org/x/sys/unix"
)

// socketsRoom is for one answer.
const socketsRoom = 64 << 10

// DialSockets opens a socket in a network namespace, for HasSocket.
func DialSockets(netNS string) (*Conn, error) {
	return Dial(netNS, unix.NETLINK_INET_DIAG, socketsRoom)
}

// HasSocket reports whether a process has the TCP socket of a connection. It has not if the process closed the socket or
// ended, whatever the kernel still sends. A kernel without the module tcp_diag says that there is none. The source is
// linux/inet_diag.h.
func (c *Conn) HasSocket(ctx context.Context, local, remote netip.AddrPort) (has bool, err error) {
	const (
		protocolAt                                      = unix.NLMSG_HDRLEN + 1
		portAt, peerPortAt, addressAt, peerAt, cookieAt = 4, 6, 8, 24, 44 // behind the first 4 bytes of struct inet_diag_req_v2
		requestLen, inodeAt, answerLen                  = 52, 68, 72
		listening                                       = 10 // TCP_LISTEN: the kernel returns it where no connection is
	)
	family, attrs := uint8(unix.AF_INET6), make([]byte, requestLen)
	if local.Addr().Is4() {
		family = unix.AF_INET
	}
	binary.BigEndian.PutUint16(attrs[portAt:], local.Port())
	binary.BigEndian.PutUint16(attrs[peerPortAt:], remote.Port())
	copy(attrs[addressAt:], local.Addr().AsSlice())
	copy(attrs[peerAt:], remote.Addr().AsSlice())
	binary.NativeEndian.PutUint64(attrs[cookieAt:], math.MaxUint64) // any
	request := Request(unix.SOCK_DIAG_BY_FAMILY, 0, family, attrs...)
	request[protocolAt] = unix.IPPROTO_TCP
	err = c.Ask(ctx, request, func(m Message) {
		has = len(m.Body) >= answerLen && m.Body[1] != listening && binary.NativeEndian.Uint32(m.Body[inodeAt:]) != 0
	})
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return has, err
}
