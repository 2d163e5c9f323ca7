package nft

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// Conn is a netlink socket to nf_tables. See netlinkx.Conn for its use by several goroutines.
type Conn struct {
	*netlinkx.Conn

	Limit int // bytes that one send may hold
}

const (
	// SendBuffer holds the largest transaction: the atomic replacement of a table, see
	// TestAReplacementOfALargeTableFits. The kernel does not reserve it.
	SendBuffer = 256 << 20
	// ReceiveBuffer is room for answers and notifications.
	ReceiveBuffer = 4 << 20
)

// Dial opens a socket in a network namespace: a path, a name under /run/netns, or "" for the current one. An
// error is a *proxier.UnsupportedError if the kernel has no nf_tables.
func Dial(netNS string) (*Conn, error) {
	conn, err := netlinkx.Dial(netNS, unix.NETLINK_NETFILTER, ReceiveBuffer)
	if err != nil {
		return nil, Unreachable(err)
	}
	c := &Conn{Conn: conn}
	c.Limit, err = conn.Enlarge(unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, SendBuffer)
	// With NETLINK_CAP_ACK, errors contain only the header of the refused message.
	if err = cmp.Or(err, conn.SetOption(unix.NETLINK_CAP_ACK, 1)); err != nil {
		return nil, errors.Join(fmt.Errorf("tune netlink socket: %w", err), conn.Close())
	}
	return c, nil
}

// Commit sends a transaction: all or nothing. It requests no acknowledgements: the kernel processes the whole transaction
// during the send. Its errors, if any, can be read right after it. An error is an *Error.
func (c *Conn) Commit(ctx context.Context, b *Batch) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(b.Buf) > c.Limit {
		return &Error{Op: "send", Object: "transaction", Err: fmt.Errorf(
			"%d bytes do not fit the socket's buffer of %d: raise net.core.wmem_max or run with CAP_NET_ADMIN", len(b.Buf), c.Limit)}
	}
	if err := c.send(b); err != nil {
		return Failed("send", "transaction", err)
	}
	var first error
	for {
		messages, err := c.Receive(false)
		if errors.Is(err, unix.EAGAIN) {
			return first
		}
		if err != nil {
			return Failed("receive", "answer to transaction", err)
		}
		first = cmp.Or(first, c.firstError(messages, b))
	}
}

// firstError returns the first refused message in the kernel's answers.
func (c *Conn) firstError(messages []byte, b *Batch) error {
	for i, answer := range c.Answers(messages) {
		errno := answer.Errno()
		if answer.Type != unix.NLMSG_ERROR || errno == 0 {
			continue
		}
		m := &b.Messages[i]
		object := m.Object
		if m.Detail != nil {
			object += ": " + m.Detail()
		}
		return Failed(m.Op, object+" in table "+b.Table, errno)
	}
	return nil
}

// Dump calls each with the attributes of every object that answers the question in b, which holds one message. If it
// has to start again, it calls reset.
func (c *Conn) Dump(ctx context.Context, b *Batch, reset func(), each func(attrs []byte)) error {
	err := netlinkx.Retry(func() error {
		reset()
		return c.Ask(ctx, b.Buf, func(m netlinkx.Message) {
			_, attrs := m.Netfilter()
			each(attrs)
		})
	})
	if err != nil {
		return Failed("list", b.Messages[0].Object, err)
	}
	return nil
}

// AnswersAtOnce is how many objects one Query may ask for: their answers must fit the socket's
// buffer, which may have its default size.
const AnswersAtOnce = 256

// Query calls each with the attributes of the objects that the messages of b ask for, up to the first of each message
// that does not exist. All together are AnswersAtOnce or fewer.
func (c *Conn) Query(ctx context.Context, b *Batch, each func(message int, attrs []byte)) error {
	object := b.Messages[0].Object
	if err := c.send(b); err != nil {
		return Failed("read", object, err)
	}
	q := query{each: each, left: make([]int, len(b.Messages))}
	for i := range b.Messages {
		q.left[i] = b.Messages[i].Answers
		q.sum += b.Messages[i].Answers
	}
	var refused error
	err := c.Soon(ctx, func() error {
		return c.Raw().Read(func(fd uintptr) (done bool) {
			for q.sum > 0 && refused == nil {
				var messages []byte
				if messages, refused = c.ReceiveFrom(fd); errors.Is(refused, unix.EAGAIN) {
					refused = nil
					return false
				}
				refused = cmp.Or(refused, q.receive(c, messages))
			}
			return true
		})
	})
	if err := cmp.Or(refused, err); err != nil {
		return Failed("read", object, err)
	}
	return ctx.Err()
}

// query is the state of a Query.
type query struct {
	each func(message int, attrs []byte)
	left []int // of the objects that each message asks for
	sum  int
}

// receive takes the kernel's answers.
func (q *query) receive(c *Conn, messages []byte) error {
	for i, m := range c.Answers(messages) {
		errno, served := unix.Errno(0), 1
		if m.Type == unix.NLMSG_ERROR {
			errno, served = m.Errno(), q.left[i]
		}
		q.left[i] -= served
		q.sum -= served
		switch {
		case m.Type != unix.NLMSG_ERROR:
			_, attrs := m.Netfilter()
			q.each(i, attrs)
		case errno != unix.ENOENT:
			return errno
		}
	}
	return nil
}

// send numbers the messages of b, and sends them.
func (c *Conn) send(b *Batch) error {
	b.number(c.Number(len(b.Messages)))
	return c.Send(b.Buf)
}

// Unreachable explains why the socket to nf_tables cannot be opened.
func Unreachable(err error) error {
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return &proxier.UnsupportedError{
			Feature: "nf_tables on " + KernelRelease(), Err: err,
			Hint: "load modules nfnetlink and nf_tables, or enable CONFIG_NETFILTER_NETLINK and CONFIG_NF_TABLES",
		}
	}
	return Failed("open netlink socket", "to nf_tables", err)
}

// KernelRelease names the running kernel.
func KernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "this kernel"
	}
	return "Linux " + unix.ByteSliceToString(u.Release[:])
}

// Error names the object that the kernel refused.
type Error struct {
	Op     string // "add", "delete", "list"…
	Object string // e.g. "element of set services in table ip serviceplane"
	Err    error  // the cause, often a syscall.Errno
}

func (e *Error) Error() string { return fmt.Sprintf("%s %s: %v", e.Op, e.Object, e.Err) }
func (e *Error) Unwrap() error { return e.Err }

// Failed is an *Error that says what to do, where a privilege is missing.
func Failed(op, object string, err error) error {
	return netlinkx.Denied(&Error{Op: op, Object: object, Err: err})
}
