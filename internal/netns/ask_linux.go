package netns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// What can become of a question that nobody answers, to be told apart with
// errors.Is. The cause is wrapped too.
var (
	// ErrRefused says that the connection was reset before it began, or that an
	// ICMP port unreachable came back.
	ErrRefused = errors.New("refused")
	// ErrUnreachable says that there is no route, here or further on.
	ErrUnreachable = errors.New("unreachable")
	// ErrTimeout says that nothing at all came back.
	ErrTimeout = errors.New("no answer")
	// ErrDroppedLocally says that the packet did not leave the sender's namespace.
	ErrDroppedLocally = errors.New("dropped locally")
)

// Answer is what a Server said.
type Answer struct {
	// Server is the name of the server.
	Server string
	// Source is the client's address as the server sees it.
	Source netip.AddrPort
	// Local is the server's own address that the packets reached it at.
	Local netip.AddrPort
}

// AskOptions refines a question. The zero value asks from any address and is
// patient.
type AskOptions struct {
	// From is the local address; the zero value leaves it to routing.
	From netip.Addr
	// Timeout is how long to wait for the answer, from when the question is sent; 0
	// means 30s, which is waited out only when something is wrong: who wants no answer
	// has less.
	Timeout time.Duration
}

const (
	defaultTimeout = 30 * time.Second
	// refusalGrace is how long a port unreachable of the own host may take.
	refusalGrace = 50 * time.Millisecond
)

// Ask opens a connection ("tcp") or sends a datagram ("udp") from inside ns and
// returns what the Server at the other end says. The error wraps ErrRefused,
// ErrUnreachable, ErrTimeout or ErrDroppedLocally where it is one of these.
func Ask(ctx context.Context, ns *NS, network string, to netip.AddrPort, opts AskOptions) (Answer, error) {
	flow, err := Open(ctx, ns, network, to, opts)
	if err != nil {
		return Answer{}, err
	}
	answer, err := flow.Ask(ctx)
	return answer, errors.Join(err, flow.Close())
}

// Flow is a TCP connection, or a UDP socket with one peer, that asks the same
// Server again and again. It is for one goroutine at a time.
type Flow struct {
	conn    net.Conn
	lines   *bufio.Scanner
	timeout time.Duration
}

// Open begins a Flow, with the errors of Ask.
func Open(ctx context.Context, ns *NS, network string, to netip.AddrPort, opts AskOptions) (*Flow, error) {
	if opts.Timeout == 0 {
		opts.Timeout = defaultTimeout
	}
	conn, err := ns.dialOptional(ctx, network, opts, to.String())
	if err != nil {
		return nil, outcome(err)
	}
	return &Flow{conn: conn, lines: bufio.NewScanner(conn), timeout: opts.Timeout}, nil
}

// Close ends the flow.
func (f *Flow) Close() error { return f.conn.Close() }

// Ask sends one more question over the flow, with the errors of the function Ask.
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
	if !f.lines.Scan() {
		err := outcome(cmpErr(f.lines.Err(), unix.ECONNRESET))
		f.lines = bufio.NewScanner(f.conn) // the next datagram may be answered
		return Answer{}, err
	}
	return parseAnswer(f.lines.Text())
}

// writeOutcome looks twice at EPERM. The kernel returns it for a datagram that a
// rule dropped and for one that a rule rejected; in the latter case the port
// unreachable waits on the socket.
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

// dialOptional is Dial with options, whose time begins inside the namespace: getting
// there takes long on a busy machine.
func (n *NS) dialOptional(ctx context.Context, network string, opts AskOptions, address string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: opts.Timeout}
	if opts.From.IsValid() {
		var err error
		if dialer.LocalAddr, err = localAddr(network, opts.From); err != nil {
			return nil, err
		}
	}
	return n.dial(ctx, dialer, network, address)
}

func parseAnswer(line string) (a Answer, err error) {
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

// outcome adds the sentinel that the errno stands for.
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

// cmpErr returns err, or fallback when a scanner ended without an error.
func cmpErr(err, fallback error) error {
	if err == nil {
		return fallback
	}
	return err
}
