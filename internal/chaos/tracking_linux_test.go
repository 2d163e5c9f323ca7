package chaos

import (
	"encoding/binary"
	"errors"
	"os"
	"strconv"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// mark is that of the flows that fill connection tracking.
const mark = 0xc4a05

// Messages and attributes of linux/netfilter/nfnetlink_conntrack.h.
const (
	newFlow    = unix.NFNL_SUBSYS_CTNETLINK << 8
	deleteFlow = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2

	attrOrigin, attrReply, attrStatus, attrTimeout, attrMark, attrMask = 1, 2, 3, 7, 8, 21

	seenReply, assured, confirmed = 1 << 1, 1 << 2, 1 << 3 // which the kernel does not drop when it needs room
)

// trackingFull fills the node's connection tracking with flows of others, lets the Services
// change meanwhile, and deletes these flows.
func trackingFull(g *game) {
	if notInVM() == "" { // this limit is the machine's
		const file = "/proc/sys/net/netfilter/nf_conntrack_max"
		old, err := os.ReadFile(file)
		if err = errors.Join(err, os.WriteFile(file, []byte("20000"), 0)); err != nil {
			g.t.Fatal(err)
		}
		defer func() { _ = os.WriteFile(file, old, 0) }()
	}
	limit, sent := g.sysctl("nf_conntrack_max"), 0
	for g.sysctl("nf_conntrack_count") < limit && sent < 2*limit {
		sent = g.flows(sent)
	}
	g.t.Logf("%d flows of at most %d", g.sysctl("nf_conntrack_count"), limit)
	g.scale()
	for range 4 { // flows of clients end, and make room
		for range 4 {
			sent = g.flows(sent)
		}
		g.wait(longest)
	}
	g.tracking(func(c *netlink.Conn) error {
		value := binary.BigEndian.AppendUint32(nil, mark)
		_, err := c.Execute(message(deleteFlow, netlink.Request|netlink.Acknowledge, func(e *netlink.AttributeEncoder) {
			e.Bytes(attrMark, value)
			e.Bytes(attrMask, []byte{0xff, 0xff, 0xff, 0xff})
		}))
		return err
	})
}

// sysctl reads a setting of the node's connection tracking.
func (g *game) sysctl(name string) (n int) {
	g.t.Helper()
	err := g.Node.Do(func() error {
		text, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
		if err != nil {
			return err
		}
		n, err = strconv.Atoi(strings.TrimSpace(string(text)))
		return err
	})
	if err != nil {
		g.t.Fatal(err)
	}
	return n
}

// flows adds flows of UDP between addresses that nobody has, as many as fit into a message. It
// returns the number of the next one.
func (g *game) flows(first int) (next int) {
	g.t.Helper()
	const batch = 500
	var messages []netlink.Message
	for next = first; next < first+batch; next++ {
		from := [4]byte{192, 0, 2, 200}
		to := [4]byte{233, 252, 0, byte(next >> 16)}
		port := uint16(next)
		messages = append(messages, message(newFlow, netlink.Request|netlink.Create, func(e *netlink.AttributeEncoder) {
			e.Nested(attrOrigin, tuple(from, to, port, 9))
			e.Nested(attrReply, tuple(to, from, 9, port))
			e.Bytes(attrStatus, binary.BigEndian.AppendUint32(nil, seenReply|assured|confirmed))
			e.Bytes(attrTimeout, binary.BigEndian.AppendUint32(nil, 600))
			e.Bytes(attrMark, binary.BigEndian.AppendUint32(nil, mark))
		}))
	}
	g.tracking(func(c *netlink.Conn) error {
		_, err := c.SendMessages(messages) // errors that the kernel answers are not read: it has no room
		return err
	})
	return next
}

// tracking talks with the node's connection tracking.
func (g *game) tracking(talk func(*netlink.Conn) error) {
	g.t.Helper()
	err := g.Node.Do(func() error {
		c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
		if err != nil {
			return err
		}
		return errors.Join(talk(c), c.Close())
	})
	if err != nil {
		g.t.Fatalf("write flows: %v", err)
	}
}

func message(kind netlink.HeaderType, flags netlink.HeaderFlags, attributes func(*netlink.AttributeEncoder)) netlink.Message {
	e := netlink.NewAttributeEncoder()
	attributes(e)
	data, err := e.Encode()
	if err != nil {
		panic(err) // the attributes have constant sizes
	}
	family := []byte{unix.AF_INET, 0, 0, 0} // nfgenmsg
	return netlink.Message{Header: netlink.Header{Type: kind, Flags: flags}, Data: append(family, data...)}
}

func tuple(from, to [4]byte, fromPort, toPort uint16) func(*netlink.AttributeEncoder) error {
	const ip, proto, source, destination, number, sourcePort, destinationPort = 1, 2, 1, 2, 1, 2, 3
	return func(e *netlink.AttributeEncoder) error {
		e.Nested(ip, func(e *netlink.AttributeEncoder) error {
			e.Bytes(source, from[:])
			e.Bytes(destination, to[:])
			return nil
		})
		e.Nested(proto, func(e *netlink.AttributeEncoder) error {
			e.Uint8(number, unix.IPPROTO_UDP)
			e.Bytes(sourcePort, binary.BigEndian.AppendUint16(nil, fromPort))
			e.Bytes(destinationPort, binary.BigEndian.AppendUint16(nil, toPort))
			return nil
		})
		return nil
	}
}
