package netns

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// The networks of package net for ICMP.
const (
	icmp4 = "ip4:icmp"
	icmp6 = "ip6:ipv6-icmp"
)

// Ping sends one ICMP echo request from inside ns and waits for the reply. Its errors are
// those of Ask. Concurrent Pings from one namespace to one address may receive each
// other's replies.
func Ping(ctx context.Context, ns *NS, to netip.Addr, opts AskOptions) error {
	opts.Timeout = cmp.Or(opts.Timeout, defaultTimeout)
	network, request, reply := icmp4, icmp.Type(ipv4.ICMPTypeEcho), byte(ipv4.ICMPTypeEchoReply)
	if to.Is6() {
		network, request, reply = icmp6, ipv6.ICMPTypeEchoRequest, byte(ipv6.ICMPTypeEchoReply)
	}
	// The kernel sets the checksum of ICMPv6, which includes a pseudo header.
	echo, err := (&icmp.Message{Type: request, Body: &icmp.Echo{ID: unix.Getpid() & 0xffff}}).Marshal(nil)
	if err != nil {
		return fmt.Errorf("ping %s: %w", to, err)
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
	if _, err := conn.Write(echo); err != nil {
		return flow.writeOutcome(err)
	}
	if opts.Flusher != nil {
		if err := opts.Flusher.Flush(ctx); err != nil {
			return err
		}
	}
	packets, ok := conn.(net.PacketConn) // unlike Read, ReadFrom cuts off the IPv4 header
	if !ok {
		return fmt.Errorf("ping %s: unexpected %T", to, conn)
	}
	message := make([]byte, 512)
	for {
		if opts.Flusher != nil {
			if err := heard(conn); err != nil {
				return outcome(err)
			}
		}
		n, _, err := packets.ReadFrom(message)
		if err != nil {
			return outcome(err)
		}
		if n >= len(echo) && message[0] == reply {
			return nil
		}
	}
}
