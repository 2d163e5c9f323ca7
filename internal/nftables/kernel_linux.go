package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/proxier"
)

// kernel is the engine's access to nf_tables.
type kernel interface {
	// commit sends the messages of w as one transaction: all or nothing.
	commit(ctx context.Context, w *wire) error
	// dump calls each with the attributes of every object that answers the request in w,
	// which holds one message. If it has to start again, it calls reset.
	dump(ctx context.Context, w *wire, reset func(), each func(attrs []byte)) error
	// query calls each with the attributes of the objects that the messages of w ask for, up to
	// the first of each message that does not exist. All together are answersAtOnce or fewer.
	query(ctx context.Context, w *wire, each func(message int, attrs []byte)) error
	// port is the address of the socket. Notifications name it as the origin of a change.
	port() uint32
	close() error
}

// socket is a netlink socket in the network namespace of the engine.
type socket struct {
	*netlinkx.Conn

	limit int // what one send may hold
}

const (
	// sendBuffer holds the largest transaction: the atomic replacement of a table, see
	// TestAReplacementOfALargeTableFits. The kernel does not reserve it.
	sendBuffer    = 256 << 20
	receiveBuffer = 4 << 20
)

// openSocket opens a socket in a network namespace: a path, a name under
// /run/netns, or "" for the current one.
func openSocket(netNS string) (*socket, error) {
	conn, err := netlinkx.Dial(netNS, unix.NETLINK_NETFILTER, receiveBuffer)
	if err != nil {
		return nil, unreachable(err)
	}
	s := &socket{Conn: conn}
	s.limit, err = conn.Enlarge(unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer)
	// With NETLINK_CAP_ACK, errors contain only the header of the refused message.
	if err = cmp.Or(err, conn.SetOption(unix.NETLINK_CAP_ACK, 1)); err != nil {
		return nil, errors.Join(fmt.Errorf("tune netlink socket: %w", err), conn.Close())
	}
	return s, nil
}

func (s *socket) close() error { return s.Close() }

func (s *socket) port() uint32 { return s.Port() }

// commit requests no acknowledgements: the kernel processes the whole transaction during
// the send. Its errors, if any, can be read right after it.
func (s *socket) commit(ctx context.Context, w *wire) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(w.buf) > s.limit {
		return &writeError{op: "send", object: "transaction", err: fmt.Errorf(
			"%d bytes do not fit the socket's buffer of %d: raise net.core.wmem_max or run with CAP_NET_ADMIN", len(w.buf), s.limit)}
	}
	if err := s.send(w); err != nil {
		return classify("send", "transaction", err)
	}
	var first error
	for {
		messages, err := s.Receive(false)
		if errors.Is(err, unix.EAGAIN) {
			return first
		}
		if err != nil {
			return classify("receive", "answer to transaction", err)
		}
		if err := s.firstError(messages, w); err != nil && first == nil {
			first = err
		}
	}
}

// firstError returns the first refused message in the kernel's answers.
func (s *socket) firstError(messages []byte, w *wire) error {
	for i, answer := range s.Answers(messages) {
		errno := answer.Errno()
		if answer.Type != unix.NLMSG_ERROR || errno == 0 {
			continue
		}
		m := w.messages[i]
		return classify(m.op, m.describe(w.family)+" in table "+w.table, errno)
	}
	return nil
}

func (s *socket) dump(ctx context.Context, w *wire, reset func(), each func(attrs []byte)) error {
	err := netlinkx.Retry(func() error {
		reset()
		return s.Ask(ctx, w.buf, func(m netlinkx.Message) {
			_, attrs := m.Netfilter()
			each(attrs)
		})
	})
	if err != nil {
		return classify("list", w.messages[0].object, err)
	}
	return nil
}

// answersAtOnce is how many objects one query may ask for: their answers must fit the socket's
// buffer, which may have its default size.
const answersAtOnce = 256

func (s *socket) query(ctx context.Context, w *wire, each func(message int, attrs []byte)) error {
	object := w.messages[0].object
	if err := s.send(w); err != nil {
		return classify("read", object, err)
	}
	q := query{each: each, left: make([]int, len(w.messages))}
	for i := range w.messages {
		q.left[i] = w.messages[i].objects
		q.sum += w.messages[i].objects
	}
	var failed error
	err := s.Soon(ctx, func() error {
		return s.Raw().Read(func(fd uintptr) (done bool) {
			for q.sum > 0 && failed == nil {
				var messages []byte
				if messages, failed = s.ReceiveFrom(fd); errors.Is(failed, unix.EAGAIN) {
					failed = nil
					return false
				}
				failed = cmp.Or(failed, q.receive(s, messages))
			}
			return true
		})
	})
	if err := cmp.Or(failed, err); err != nil {
		return classify("read", object, err)
	}
	return ctx.Err()
}

// query is the state of a query.
type query struct {
	each func(message int, attrs []byte)
	left []int // of the objects that each message asks for
	sum  int
}

// receive takes the kernel's answers.
func (q *query) receive(s *socket, messages []byte) error {
	for i, m := range s.Answers(messages) {
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

// send numbers the messages of w, and sends them.
func (s *socket) send(w *wire) error {
	w.number(s.Number(len(w.messages)))
	return s.Send(w.buf)
}

// unreachable explains why the socket to nf_tables cannot be opened.
func unreachable(err error) error {
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return &proxier.UnsupportedError{
			Feature: "nf_tables on " + kernelRelease(), Err: err,
			Hint: "load modules nfnetlink and nf_tables, or enable CONFIG_NETFILTER_NETLINK and CONFIG_NF_TABLES",
		}
	}
	return classify("open netlink socket", "to nf_tables", err)
}

// writeError names the object that the kernel refused.
type writeError struct {
	op     string // "add", "delete", "list"…
	object string // e.g. "element of set services in table ip serviceplane"
	err    error  // the cause, often a syscall.Errno
}

func (e *writeError) Error() string { return fmt.Sprintf("%s %s: %v", e.op, e.object, e.err) }
func (e *writeError) Unwrap() error { return e.err }

// classify turns an errno into an error that says what to do.
func classify(op, object string, err error) error {
	return netlinkx.Denied(&writeError{op: op, object: object, err: err})
}
