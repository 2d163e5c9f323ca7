package netlinkx

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
)

// Conn is a netlink socket of one family in one network namespace. One goroutine uses it at a time, but any may
// change its deadline and its groups.
type Conn struct {
	*os.File // for Close and SetReadDeadline

	// Buffer has what Receive returned last. A datagram that fills it may be cut.
	Buffer []byte
	// Patience is how long Soon waits.
	Patience time.Duration
	raw      syscall.RawConn
	// asked is the number of the first message that was sent last, count how many these were.
	asked, count uint32
}

// ErrLost means that notifications are missing: the kernel had no room for them.
var ErrLost = errors.New("notifications are lost")

// ErrNoAnswer means that the kernel has taken a request and says nothing. It answers while it
// takes it, so an answer that is not there soon never comes.
var ErrNoAnswer = errors.New("the kernel has not answered: its answer is lost, or the kernel hangs; it will be asked again")

// AnswerTime is how long a call waits for the kernel.
const AnswerTime = 10 * time.Second

// longestMessages is more than the kernel puts into one datagram.
const longestMessages = 128 << 10

// Dial opens a socket in a network namespace, as Open does. It has room for so many bytes of answers and
// notifications, or for as many as the privileges allow.
func Dial(netNS string, family, room int) (c *Conn, err error) {
	err = namespace.Visit(netNS, func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, family)
		if err != nil {
			return err
		}
		c = connOf(fd)
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	})
	if err == nil {
		_, err = c.Enlarge(unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, room)
	}
	if err != nil && c != nil {
		err = errors.Join(err, c.Close())
	}
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return c, nil
}

// Listen opens a socket that receives the notifications of a multicast group, as Dial does.
func Listen(netNS string, family, room, group int) (*Conn, error) {
	c, err := Dial(netNS, family, room)
	if err == nil {
		if err = c.Join(group); err != nil {
			c, err = nil, errors.Join(fmt.Errorf("listen to notifications: %w", err), c.Close())
		}
	}
	return c, err
}

// connOf takes over a descriptor that does not block.
func connOf(fd int) *Conn {
	c := &Conn{File: os.NewFile(uintptr(fd), "netlink"), Buffer: make([]byte, longestMessages), Patience: AnswerTime}
	c.raw, _ = c.SyscallConn() // never fails for an open file
	return c
}

// control calls f with the descriptor.
func (c *Conn) control(f func(fd int) error) (err error) {
	closed := c.raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return cmp.Or(closed, err)
}

// Enlarge makes a buffer as large as the privileges allow, and returns its size. force and option are
// SO_RCVBUFFORCE and SO_RCVBUF, or those to send.
func (c *Conn) Enlarge(force, option, size int) (got int, err error) {
	err = c.control(func(fd int) error {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) != nil {
			// Without CAP_NET_ADMIN in the initial user namespace the limit of the system applies.
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, size)
		}
		got, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, option)
		return err
	})
	return got / 2, err // the kernel counts its own overhead
}

// SetOption sets an option of SOL_NETLINK.
func (c *Conn) SetOption(option, value int) error {
	return c.control(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_NETLINK, option, value) })
}

// Join begins to receive the notifications of a multicast group.
func (c *Conn) Join(group int) error { return c.SetOption(unix.NETLINK_ADD_MEMBERSHIP, group) }

// Leave ends that.
func (c *Conn) Leave(group int) error { return c.SetOption(unix.NETLINK_DROP_MEMBERSHIP, group) }

// Filter makes the kernel drop the datagrams for which a program returns 0.
func (c *Conn) Filter(program []bpf.Instruction) error {
	raw, err := bpf.Assemble(program)
	if err != nil {
		return fmt.Errorf("assemble socket filter: %w", err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return c.control(func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	})
}

// Port is the address of the socket, 0 if it is closed.
func (c *Conn) Port() (port uint32) {
	_ = c.control(func(fd int) error {
		name, err := unix.Getsockname(fd)
		if own, ok := name.(*unix.SockaddrNetlink); ok {
			port = own.Pid
		}
		return err
	})
	return port
}

// Send sends messages to the kernel.
func (c *Conn) Send(messages []byte) error {
	var sent error
	closed := c.raw.Write(func(fd uintptr) bool {
		_, sent = unix.Write(int(fd), messages)
		return !errors.Is(sent, unix.EAGAIN) && !errors.Is(sent, unix.EINTR)
	})
	return cmp.Or(closed, sent)
}

// Receive returns the messages of one datagram; the next call overwrites them. If there are none, it waits until
// the deadline, or returns EAGAIN if it should not wait. An error wraps ErrLost if some are missing.
func (c *Conn) Receive(wait bool) (messages []byte, err error) {
	receive := func(fd uintptr) { messages, err = c.ReceiveFrom(fd) }
	var closed error
	if wait {
		closed = c.raw.Read(func(fd uintptr) bool {
			receive(fd)
			return !errors.Is(err, unix.EAGAIN)
		})
	} else {
		closed = c.raw.Control(receive) // also within RawConn.Read, and after the deadline
	}
	return messages, cmp.Or(closed, err)
}

// ReceiveFrom is Receive without waiting, for a function that RawConn.Read calls with the descriptor.
func (c *Conn) ReceiveFrom(fd uintptr) ([]byte, error) {
	for {
		n, err := unix.Read(int(fd), c.Buffer)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS), err == nil && n == len(c.Buffer): // which may be cut
			return nil, fmt.Errorf("%w: %w", ErrLost, cmp.Or(err, error(unix.EMSGSIZE)))
		case err != nil:
			return nil, err
		}
		return c.Buffer[:n], nil
	}
}

// Raw is for calls that Conn does not have.
func (c *Conn) Raw() syscall.RawConn { return c.raw }

// Number returns the number of the first of n messages that are sent next. From then on, answers to others are late.
func (c *Conn) Number(n int) (first uint32) {
	c.asked, c.count = c.asked+c.count, uint32(n)
	return c.asked
}

// Answers yields each message that answers what has been numbered last, and its place there.
func (c *Conn) Answers(messages []byte) iter.Seq2[int, Message] {
	return func(yield func(int, Message) bool) {
		for m := range Messages(messages) {
			if i := m.number - c.asked; i < c.count && !yield(int(i), m) {
				return
			}
		}
	}
}

// Ask sends a request, such as from Request, and calls each for its answers. They are one message, all messages of a
// dump, or what comes before the acknowledgement, as the request's flags say. A request may be several messages, whose
// first has the flags. An error is the kernel's, ErrNoAnswer, that of ctx, or ErrInterrupted: see Retry.
func (c *Conn) Ask(ctx context.Context, request []byte, each func(Message)) error {
	several := binary.NativeEndian.Uint16(request[6:])&(unix.NLM_F_DUMP|unix.NLM_F_ACK) != 0
	for rest, number := request, c.Number(1); len(rest) >= unix.NLMSG_HDRLEN; rest = rest[aligned(rest):] {
		binary.NativeEndian.PutUint32(rest[8:], number)
	}
	if err := c.Send(request); err != nil {
		return err
	}
	var interrupted error
	for {
		var messages []byte
		if err := c.Soon(ctx, func() (err error) { messages, err = c.Receive(true); return err }); err != nil {
			return err
		}
		for _, m := range c.Answers(messages) {
			if m.Flags&unix.NLM_F_DUMP_INTR != 0 {
				interrupted = ErrInterrupted
			}
			if m.Type != unix.NLMSG_DONE && m.Type != unix.NLMSG_ERROR {
				if each(m); several {
					continue
				}
			} else if errno := m.Errno(); errno != 0 {
				return errno
			}
			return cmp.Or(ctx.Err(), interrupted)
		}
	}
}

// AskAll is Ask, and asks again if the list changes meanwhile.
func (c *Conn) AskAll(request []byte) (answers []Message, err error) {
	err = Retry(func() error {
		answers = nil
		return c.ask(request, func(m Message) {
			m.Body = bytes.Clone(m.Body)
			answers = append(answers, m)
		})
	})
	return answers, err
}

// ask is Ask, which Patience limits.
func (c *Conn) ask(request []byte, each func(Message)) error {
	return c.Ask(context.Background(), request, each) //nolint:forbidigo // it ends soon
}

// Soon calls receive, which receives answers that must be there soon. The end of ctx ends it.
func (c *Conn) Soon(ctx context.Context, receive func() error) error {
	if err := c.SetReadDeadline(time.Now().Add(c.Patience)); err != nil {
		return err
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = c.SetReadDeadline(time.Unix(1, 0)) // fails only if the socket is closed
	})
	err := receive()
	if !stop() {
		<-interrupted
	}
	err = cmp.Or(err, c.SetReadDeadline(time.Time{})) // none for later calls
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = cmp.Or(ctx.Err(), fmt.Errorf("%w (after %v)", ErrNoAnswer, c.Patience))
	}
	return err
}

// Request returns a message to a netfilter subsystem for Ask: typ has the subsystem in its upper byte.
func Request(typ, flags uint16, family uint8, attrs ...byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+nfgenLen+len(attrs)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|flags)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0, family, unix.NFNETLINK_V0, 0, 0) // number and port, then struct nfgenmsg
	return append(b, attrs...)
}

// nfgenLen is sizeof(struct nfgenmsg).
const nfgenLen = 4

// Message is a netlink message.
type Message struct {
	Type, Flags uint16
	Body        []byte
	number      uint32
}

// Messages yields each message in b. An invalid length ends the last one with b.
func Messages(b []byte) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			n := int(binary.NativeEndian.Uint32(b))
			if n < unix.NLMSG_HDRLEN || n > len(b) {
				n = len(b)
			}
			m := Message{
				Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
				number: binary.NativeEndian.Uint32(b[8:]), Body: b[unix.NLMSG_HDRLEN:n],
			}
			if !yield(m) {
				return
			}
			b = b[aligned(b):]
		}
	}
}

// aligned is where the next message of b begins, which holds at least a header.
func aligned(b []byte) int {
	n := int(binary.NativeEndian.Uint32(b))
	if n < unix.NLMSG_HDRLEN || n > len(b) {
		return len(b)
	}
	return min((n+3)&^3, len(b))
}

// Errno is the result in a message of type NLMSG_ERROR or NLMSG_DONE: 0 is success. Without a result it is
// EBADMSG.
func (m Message) Errno() unix.Errno {
	if len(m.Body) < 4 {
		return unix.EBADMSG
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(m.Body)))
}

// Netfilter returns the IP family and the attributes of a message of a netfilter subsystem.
func (m Message) Netfilter() (family uint8, attrs []byte) {
	if len(m.Body) < nfgenLen {
		return unix.NFPROTO_UNSPEC, nil
	}
	return m.Body[0], m.Body[nfgenLen:]
}

// AddrChange is a notification that an address of a link is new, or gone.
type AddrChange struct {
	Addr netip.Addr
	Link int // index
	New  bool
}

// AddrChange decodes a message of the groups RTNLGRP_IPV4_IFADDR and RTNLGRP_IPV6_IFADDR. The address of other
// messages is invalid.
func (m Message) AddrChange() (c AddrChange) {
	isAddr := m.Type == unix.RTM_NEWADDR || m.Type == unix.RTM_DELADDR
	if !isAddr || len(m.Body) < unix.SizeofIfAddrmsg {
		return c
	}
	attrs := m.Body[unix.SizeofIfAddrmsg:]
	addr := Find(attrs, unix.IFA_LOCAL)
	if addr == nil {
		addr = Find(attrs, unix.IFA_ADDRESS)
	}
	c.Addr, _ = netip.AddrFromSlice(addr)
	c.Link, c.New = int(binary.NativeEndian.Uint32(m.Body[4:])), m.Type == unix.RTM_NEWADDR
	return c
}
