package netns

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Why a request got no answer, for errors.Is. The error wraps its cause too.
var (
	// ErrRefused means a RST in the handshake, or an ICMP port unreachable.
	ErrRefused = errors.New("refused")
	// ErrUnreachable means that a route is missing, here or on a router.
	ErrUnreachable = errors.New("unreachable")
	// ErrTimeout means that no packet came back.
	ErrTimeout = errors.New("no answer")
	// ErrDroppedLocally means that the packet did not leave the sender's namespace.
	ErrDroppedLocally = errors.New("dropped locally")
)

// Answer is a Server's answer.
type Answer struct {
	// Server is the name of the server.
	Server string
	// Source is the client's address as the server sees it.
	Source netip.AddrPort
	// Local is the destination of the packets as the server sees it.
	Local netip.AddrPort
}

// AskOptions are the options of a request.
type AskOptions struct {
	// From is the source address; with the zero value, routing chooses it.
	From netip.Addr
	// FromPort is the source port; 0 means any. It needs From.
	FromPort uint16
	// Timeout is how long to wait for the answer after the request is sent; 0 means 30s.
	Timeout time.Duration
	// Flusher is for a request that expects no answer. If not nil, Ask calls its Flush when the request
	// is sent, from another goroutine or this one. Once it returns, all answers must have come: Ask waits
	// on only if it heard something.
	Flusher Flusher
}

// Flusher returns when whatever was sent before has come to its end.
type Flusher = interface {
	Flush(ctx context.Context) error
}

const (
	defaultTimeout = 30 * time.Second
	// refusalGrace is how long a port unreachable of the same host may take: in emulation
	// on a busy machine, more than 50 ms.
	refusalGrace = 500 * time.Millisecond
)

// Ask opens a connection ("tcp") or sends a datagram ("udp") from inside ns and
// returns the Server's answer. The error wraps ErrRefused, ErrUnreachable, ErrTimeout or
// ErrDroppedLocally if it is one of these.
func Ask(ctx context.Context, ns *NS, network string, to netip.AddrPort, opts AskOptions) (Answer, error) {
	flow, err := Open(ctx, ns, network, to, opts)
	if err != nil {
		return Answer{}, err
	}
	answer, err := flow.Ask(ctx)
	return answer, errors.Join(err, flow.Close())
}

// Flow is a TCP connection, or a UDP socket with one peer, for several requests to the
// same Server. Only one goroutine may use it at a time.
type Flow struct {
	conn    net.Conn
	lines   *bufio.Scanner
	timeout time.Duration
	flusher Flusher
}

// Open opens a Flow. Its errors are those of Ask.
func Open(ctx context.Context, ns *NS, network string, to netip.AddrPort, opts AskOptions) (flow *Flow, err error) {
	ns.choosePort(network, &opts)
	err = ns.Do(func() (err error) {
		flow, err = OpenHere(ctx, network, to, opts)
		return err
	})
	return flow, err
}

// OpenHere is Open from the namespace of the calling thread, for clients that open many flows
// in one function of NS.Do: to enter a namespace costs more than a connection.
func OpenHere(ctx context.Context, network string, to netip.AddrPort, opts AskOptions) (*Flow, error) {
	opts.Timeout = cmp.Or(opts.Timeout, defaultTimeout)
	dialer, err := opts.dialer(network)
	if err != nil {
		return nil, err
	}
	conn, err := opts.dial(ctx, dialer, network, to)
	if err != nil {
		return nil, outcome(err)
	}
	return &Flow{conn: conn, lines: bufio.NewScanner(conn), timeout: opts.Timeout, flusher: opts.Flusher}, nil
}

// SentAgain returns how many packets of a TCP connection the host had to send again.
func (f *Flow) SentAgain() (packets uint32, err error) {
	tcp, ok := f.conn.(*net.TCPConn)
	if !ok {
		return 0, nil
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0, err
	}
	info, err := tcpInfo(raw)
	if err != nil {
		return 0, err
	}
	return info.Total_retrans, nil
}

// Expect sets what AskOptions.Flusher is, for the requests from now on.
func (f *Flow) Expect(flusher Flusher) { f.flusher = flusher }

// Close closes the flow.
func (f *Flow) Close() error { return f.conn.Close() }

// Abort closes the flow; a TCP connection with a reset, so that its port is free at once.
func (f *Flow) Abort() error {
	if tcp, ok := f.conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	return f.conn.Close()
}

// Ask sends a request over the flow. Its errors are those of the function Ask.
func (f *Flow) Ask(ctx context.Context) (Answer, error) {
	deadline := time.Now().Add(f.timeout)
	if end, ok := ctx.Deadline(); ok && end.Before(deadline) {
		deadline = end
	}
	if err := f.conn.SetDeadline(deadline); err != nil {
		return Answer{}, fmt.Errorf("set deadline: %w", err)
	}
	if _, err := f.conn.Write([]byte("?\n")); err != nil {
		return Answer{}, f.writeOutcome(err)
	}
	if _, isUDP := f.conn.(*net.UDPConn); isUDP && f.flusher != nil {
		if err := f.flusher.Flush(ctx); err != nil {
			return Answer{}, err
		}
		if err := heard(f.conn); err != nil {
			return Answer{}, outcome(err)
		}
	}
	if !f.lines.Scan() {
		err := outcome(cmp.Or[error](f.lines.Err(), unix.ECONNRESET)) // at its end, a scanner has no error
		f.lines = bufio.NewScanner(f.conn)                            // the next datagram may be answered
		return Answer{}, err
	}
	return ParseAnswer(f.lines.Text())
}

// writeOutcome distinguishes the two causes of EPERM: a rule dropped the datagram, or a
// rule rejected it. In the latter case the port unreachable is queued on the socket.
func (f *Flow) writeOutcome(err error) error {
	if !errors.Is(err, unix.EPERM) {
		return outcome(err)
	}
	if deadlineErr := f.conn.SetReadDeadline(time.Now().Add(refusalGrace)); deadlineErr != nil {
		return fmt.Errorf("set deadline: %w", deadlineErr)
	}
	if _, readErr := f.conn.Read(make([]byte, 1)); errors.Is(readErr, unix.ECONNREFUSED) {
		return outcome(readErr)
	}
	return outcome(err)
}

// dialer returns the dialer of a request. Its timeout starts when it dials: entering a
// namespace may take long on a busy machine.
func (o AskOptions) dialer(network string) (*net.Dialer, error) {
	dialer := &net.Dialer{Timeout: o.Timeout}
	if o.From.IsValid() {
		var err error
		if dialer.LocalAddr, err = localAddr(network, netip.AddrPortFrom(o.From, o.FromPort)); err != nil {
			return nil, err
		}
	}
	configure(dialer)
	return dialer, nil
}

// ParseAnswer parses what a Server sends.
func ParseAnswer(line string) (a Answer, err error) {
	var source, local string
	if _, err := fmt.Sscan(line, &a.Server, &source, &local); err != nil {
		return Answer{}, fmt.Errorf("parse answer %q: %w", line, err)
	}
	if a.Source, err = netip.ParseAddrPort(source); err != nil {
		return Answer{}, fmt.Errorf("parse source of answer %q: %w", line, err)
	}
	if a.Local, err = netip.ParseAddrPort(local); err != nil {
		return Answer{}, fmt.Errorf("parse address of answer %q: %w", line, err)
	}
	return a, nil
}

// outcome wraps the sentinel error for the errno.
func outcome(err error) error {
	var timeout net.Error
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("%w: %w", ErrRefused, err)
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %w", ErrDroppedLocally, err)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded),
		errors.As(err, &timeout) && timeout.Timeout():
		return fmt.Errorf("%w: %w", ErrTimeout, err)
	default:
		return err
	}
}
