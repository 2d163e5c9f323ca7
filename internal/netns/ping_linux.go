package netns

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// The networks of package net for ICMP.
const (
	icmp4 = "ip4:icmp"
	icmp6 = "ip6:ipv6-icmp"
)

// Message types of RFC 792 and RFC 4443, and the size of an echo header.
const (
	echoRequest4, echoReply4 = 8, 0
	echoRequest6, echoReply6 = 128, 129
	echoHeader               = 8
)

// Ping sends one ICMP echo request from inside ns and waits for the reply. Its errors are
// those of Ask. Concurrent Pings from one namespace to one address may receive each
// other's replies.
func Ping(ctx context.Context, ns *NS, to netip.Addr, opts AskOptions) error {
	opts.Timeout = cmp.Or(opts.Timeout, defaultTimeout)
	network, request, reply := icmp4, byte(echoRequest4), byte(echoReply4)
	if to.Is6() {
		network, request, reply = icmp6, echoRequest6, echoReply6
	}
	conn, err := ns.dial(ctx, network, opts, to.String())
	if err != nil {
		return outcome(err)
	}
	flow := &Flow{conn: conn}
	defer func() { _ = flow.Close() }()
	if err := conn.SetDeadline(time.Now().Add(opts.Timeout)); err != nil {
		return fmt.Errorf("set deadline: %w", err)
	}
	if _, err := conn.Write(echo(request)); err != nil {
		return flow.writeOutcome(err)
	}
	if opts.Settled != nil {
		if err := opts.Settled.Settle(ctx); err != nil {
			return err
		}
	}
	packets, ok := conn.(net.PacketConn) // unlike Read, ReadFrom cuts off the IPv4 header
	if !ok {
		return fmt.Errorf("ping %s: unexpected %T", to, conn)
	}
	message := make([]byte, 512)
	for {
		if opts.Settled != nil {
			if err := heard(conn); err != nil {
				return outcome(err)
			}
		}
		n, _, err := packets.ReadFrom(message)
		if err != nil {
			return outcome(err)
		}
		if n >= echoHeader && message[0] == reply {
			return nil
		}
	}
}

// echo builds a request without payload. For ICMPv6 the kernel overwrites the checksum,
// since it includes a pseudo header.
func echo(request byte) []byte {
	message := make([]byte, echoHeader)
	message[0] = request
	binary.BigEndian.PutUint16(message[4:], uint16(unix.Getpid()&0xffff))
	sum := uint32(0)
	for i := 0; i < len(message); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(message[i:]))
	}
	binary.BigEndian.PutUint16(message[2:], ^uint16(sum+sum>>16))
	return message
}
