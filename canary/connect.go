package canary

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"
)

// errOther means that something else than the endpoint was reached.
var errOther = errors.New("another program answered: give each proxy in this network namespace a VIP of its own, and no other use to the VIPs")

// test connects to the VIP and asks a question. The error says what to do.
func (f *family) test(ctx context.Context) error {
	limited, stop := context.WithTimeout(ctx, f.options.Timeout)
	defer stop()
	err := f.connect(limited)
	if err == nil {
		f.why, f.explained = "", time.Time{}
		return nil
	}
	if f.options.Explain != nil && !errors.Is(err, errOther) && (f.explained.IsZero() || time.Since(f.explained) >= f.options.Threshold) {
		f.why = f.explain(ctx)
		f.explained = time.Now()
	}
	return fmt.Errorf("%w: %s", err, cmp.Or(f.why, advice(err)))
}

func (f *family) explain(ctx context.Context) string {
	ctx, stop := context.WithTimeout(ctx, f.options.Timeout)
	defer stop()
	return f.options.Explain(ctx, Probe{VIP: f.vip, Endpoint: f.endpoint.address}, f.connect)
}

func (f *family) connect(ctx context.Context) error {
	conn, err := f.network.dial(ctx, f.vip)
	if err != nil {
		return fmt.Errorf("connect: %w", cause(err))
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	question, want := f.endpoint.ask()
	defer f.endpoint.take(question) // also if nobody asked for it
	if _, err := conn.Write(question[:]); err != nil {
		return fmt.Errorf("send: %w", cause(err))
	}
	var got number
	switch _, err := io.ReadFull(conn, got[:]); {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), err == nil && got != want:
		return errOther
	case err != nil:
		return fmt.Errorf("receive: %w", cause(err))
	}
	return nil
}

// cause removes the addresses, of which the port changes at each test.
func cause(err error) error {
	if o, ok := errors.AsType[*net.OpError](err); ok {
		err = o.Err
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return errTimeout
	}
	return err
}

var errTimeout = errors.New("no answer in time")

// advice returns what an operator can do about a failed test.
func advice(err error) string {
	switch {
	case errors.Is(err, errOther):
		return "look for it with ss -lntp, and at the rules for the VIP"
	case errors.Is(err, errTimeout):
		return "the proxy's rules are gone, or another program's drop the packets: compare the rules with what the proxy would write, and look for drop in other tables"
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return "the proxy's rules are gone, or another program's reject the packets: compare the rules with what the proxy would write, and look for reject in other tables"
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return "raise the limit of open files, or find the program that holds so many"
	case errors.Is(err, fs.ErrPermission):
		return "a rule at hook output, or a BPF program of the control group, forbids the connection"
	default:
		return "look at the rules and routes for the VIP"
	}
}
