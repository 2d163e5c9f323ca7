package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
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
	conn    *netlink.Conn
	raw     syscall.RawConn
	receive []byte // reused by every read
	limit   int    // what one send may hold
	// sequence is the number of the first message that was sent last. Messages of the kernel
	// with other numbers answer earlier requests.
	sequence uint32
	sent     int           // messages with numbers from sequence on
	patience time.Duration // how long a read waits for an answer
}

var errInterrupted = errors.New("interrupted by other changes each time")

// errNoAnswer means that the kernel has taken a request and says nothing. It answers while it
// takes it, so an answer that is not there soon never comes.
var errNoAnswer = errors.New("the kernel has not answered: its answer is lost, or the kernel hangs; it will be asked again")

const (
	// sendBuffer holds the largest transaction: the atomic replacement of a table, see
	// TestAReplacementOfALargeTableFits. The kernel does not reserve it.
	sendBuffer    = 256 << 20
	receiveBuffer = 4 << 20
	dumpBuffer    = 128 << 10
	dumpAttempts  = 5
	netnsDir      = "/run/netns/"
)

// openSocket opens a socket in a network namespace: a path, a name under
// /run/netns, or "" for the current one.
func openSocket(netNS string) (*socket, error) { return openSocketOf(unix.NETLINK_NETFILTER, netNS) }

// openSocketOf is openSocket for a netlink family.
func openSocketOf(family int, netNS string) (*socket, error) {
	config := &netlink.Config{}
	if netNS != "" {
		path := netNS
		if !strings.Contains(path, "/") {
			path = netnsDir + path
		}
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("open network namespace: %w", err)
		}
		config.NetNS = int(f.Fd())
		defer func() { _ = f.Close() }() // only read from
	}
	conn, err := netlink.Dial(family, config)
	if err != nil {
		return nil, unreachable(err)
	}
	s := &socket{conn: conn, receive: make([]byte, dumpBuffer), patience: netlinkx.AnswerTime}
	if err := s.tune(); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return s, nil
}

func (s *socket) tune() error {
	raw, err := s.conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("tune netlink socket: %w", err)
	}
	s.raw = raw
	// Errors then contain only the header of the refused message.
	if err := s.conn.SetOption(netlink.CapAcknowledge, true); err != nil {
		return fmt.Errorf("tune netlink socket: %w", err)
	}
	return errors.Join(err, raw.Control(func(fd uintptr) {
		s.limit = enlarge(int(fd), unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer)
		enlarge(int(fd), unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer)
	}))
}

// enlarge makes a buffer as large as the privileges allow, and returns its size.
func enlarge(fd, force, option, size int) int {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) != nil {
		// Without CAP_NET_ADMIN in the initial user namespace the limit of the system
		// applies, so the size is read back.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, size)
	}
	got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option)
	if err != nil {
		return 0
	}
	return got / 2 // the kernel counts its own overhead
}

func (s *socket) close() error { return s.conn.Close() }

func (s *socket) port() (port uint32) {
	err := s.raw.Control(func(fd uintptr) {
		if name, err := unix.Getsockname(int(fd)); err == nil {
			if own, ok := name.(*unix.SockaddrNetlink); ok {
				port = own.Pid
			}
		}
	})
	if err != nil {
		return 0 // closed
	}
	return port
}

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
		n, err := s.read(false)
		if errors.Is(err, unix.EAGAIN) {
			return first
		}
		if err != nil {
			return classify("receive", "answer to transaction", err)
		}
		if err := s.firstError(n, w); err != nil && first == nil {
			first = err
		}
	}
}

// firstError returns the first refused message in the kernel's answers, n bytes.
func (s *socket) firstError(n int, w *wire) error {
	for answer := range s.answers(n) {
		errno := answer.errno()
		if answer.typ != unix.NLMSG_ERROR || errno == 0 {
			continue
		}
		m := w.messages[answer.seq-s.sequence]
		return classify(m.op, m.describe(w.family)+" in table "+w.table, unix.Errno(errno))
	}
	return nil
}

func (s *socket) dump(ctx context.Context, w *wire, reset func(), each func(attrs []byte)) error {
	for range dumpAttempts {
		reset()
		interrupted, err := s.dumpOnce(ctx, w, each)
		if err != nil || !interrupted {
			return err
		}
	}
	return &writeError{op: "list", object: w.messages[0].object, err: errInterrupted}
}

func (s *socket) dumpOnce(ctx context.Context, w *wire, each func(attrs []byte)) (interrupted bool, err error) {
	object := w.messages[0].object
	if err := s.send(w); err != nil {
		return false, classify("list", object, err)
	}
	for {
		n, err := s.await(ctx)
		if err != nil {
			return false, classify("list", object, err)
		}
		for m := range s.answers(n) {
			interrupted = interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
			switch m.typ {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				if errno := m.errno(); errno != 0 {
					return false, classify("list", object, unix.Errno(errno))
				}
				return interrupted, ctx.Err()
			default:
				each(m.body[min(nfgenHeaderLen, len(m.body)):])
			}
		}
	}
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
	err := s.soon(ctx, func() error {
		return s.raw.Read(func(fd uintptr) (done bool) {
			for q.sum > 0 && failed == nil {
				var n int
				if n, failed = s.receiveFrom(fd); errors.Is(failed, unix.EAGAIN) {
					failed = nil
					return false
				}
				failed = cmp.Or(failed, q.receive(s, n))
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

// receive takes the answers in n bytes.
func (q *query) receive(s *socket, n int) error {
	for m := range s.answers(n) {
		i, errno, served := int(m.seq-s.sequence), unix.Errno(0), 1
		if m.typ == unix.NLMSG_ERROR {
			errno, served = unix.Errno(m.errno()), q.left[i]
		}
		q.left[i] -= served
		q.sum -= served
		switch {
		case m.typ != unix.NLMSG_ERROR:
			q.each(i, m.body[min(nfgenHeaderLen, len(m.body)):])
		case errno != unix.ENOENT:
			return errno
		}
	}
	return nil
}

// send numbers the messages of w with the next numbers, and sends them.
func (s *socket) send(w *wire) error {
	s.sequence += uint32(s.sent)
	s.sent = len(w.messages)
	w.number(s.sequence)
	var sent error
	err := s.raw.Write(func(fd uintptr) bool {
		sent = unix.Sendto(int(fd), w.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return !errors.Is(sent, unix.EAGAIN) && !errors.Is(sent, unix.EINTR)
	})
	return errors.Join(err, sent)
}

// answers yields each message of the n received bytes that answers what was sent last. Others
// are late.
func (s *socket) answers(n int) iter.Seq[header] {
	return func(yield func(header) bool) {
		for m := range messagesOf(s.receive[:n]) {
			if m.seq-s.sequence < uint32(s.sent) && !yield(m) {
				return
			}
		}
	}
}

// await reads answers.
func (s *socket) await(ctx context.Context) (n int, err error) {
	err = s.soon(ctx, func() (err error) {
		n, err = s.read(true)
		return err
	})
	return n, err
}

// soon calls read, which reads answers that must be there soon. The end of ctx ends it.
func (s *socket) soon(ctx context.Context, read func() error) error {
	if err := s.conn.SetReadDeadline(time.Now().Add(s.patience)); err != nil {
		return err
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = s.conn.SetReadDeadline(time.Unix(1, 0)) // fails only if the socket is closed
	})
	err := read()
	if !stop() {
		<-interrupted
	}
	err = cmp.Or(err, s.conn.SetReadDeadline(time.Time{})) // none for later reads
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = cmp.Or(ctx.Err(), fmt.Errorf("%w (after %v)", errNoAnswer, s.patience))
	}
	return err
}

// read receives whole answers: one that does not fit is an error. If it does not wait, and there is
// none, the error is EAGAIN.
func (s *socket) read(wait bool) (n int, err error) {
	var got error
	err = s.raw.Read(func(fd uintptr) bool {
		n, got = s.receiveFrom(fd)
		return !wait || !errors.Is(got, unix.EAGAIN)
	})
	return n, cmp.Or(err, got)
}

// receiveFrom receives what is there. An answer that fills the buffer may be cut: the longest of the
// kernel has a quarter of it.
func (s *socket) receiveFrom(fd uintptr) (n int, err error) {
	n, err = unix.Read(int(fd), s.receive)
	if err == nil && n == len(s.receive) {
		err = unix.EMSGSIZE
	}
	return n, err
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
	failed := &writeError{op: op, object: object, err: err}
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w: %w: run with CAP_NET_ADMIN in the network namespace", proxier.ErrPermission, failed)
	}
	return failed
}
