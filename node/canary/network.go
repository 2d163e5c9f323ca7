package canary

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/neterror"
)

// network is what the canary needs of the network namespace.
type network interface {
	// source returns the node's address from which it would connect to the VIP. The error
	// means that it cannot, and says what to do.
	source(ctx context.Context, vip netip.Addr) (netip.Addr, error)
	listen(ctx context.Context, address netip.AddrPort) (net.Listener, error)
	dial(ctx context.Context, to netip.AddrPort) (net.Conn, error)
}

// sockets is the network of a namespace.
type sockets struct{ netNS string }

func (s sockets) source(ctx context.Context, vip netip.Addr) (netip.Addr, error) {
	address, err := s.route(ctx, vip)
	if err == nil && address == vip { // the engine has put the VIP on the node, as IPVS needs it
		address, err = s.route(ctx, vip.Prev())
	}
	switch {
	case err != nil:
		return address, fmt.Errorf("find the route to %v: %w: %s", vip, cause(err), routeAdvice(err))
	case address.IsLoopback() || address.IsLinkLocalUnicast():
		return address, fmt.Errorf("node would connect from %v, which no rule may translate to: give the node a global address of the IP family", address)
	}
	return address, nil
}

// routeAdvice returns what an operator can do if the route to a VIP is not found.
func routeAdvice(err error) string {
	if neterror.NoDescriptors.Is(err) {
		return advice(err)
	}
	return "the node's own connections to ClusterIPs fail before any rule: add a default route for the IP family"
}

// route asks the kernel's routes. Connecting a UDP socket sends nothing.
func (s sockets) route(ctx context.Context, to netip.Addr) (source netip.Addr, err error) {
	err = namespace.Visit(s.netNS, func() error {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "udp", netip.AddrPortFrom(to, servicePort).String())
		if err != nil {
			return err
		}
		local, err := netip.ParseAddrPort(conn.LocalAddr().String())
		source = local.Addr().Unmap()
		return errors.Join(err, conn.Close())
	})
	return source, err
}

func (s sockets) listen(ctx context.Context, address netip.AddrPort) (l net.Listener, err error) {
	err = namespace.Visit(s.netNS, func() error {
		var config net.ListenConfig
		l, err = config.Listen(ctx, "tcp", address.String())
		return err
	})
	return l, err
}

func (s sockets) dial(ctx context.Context, to netip.AddrPort) (conn net.Conn, err error) {
	err = namespace.Visit(s.netNS, func() error {
		d := net.Dialer{KeepAlive: -1}
		conn, err = d.DialContext(ctx, "tcp", to.String())
		return err
	})
	return conn, err
}

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
	return f.options.Explain(ctx, f.vip, f.endpoint.address, f.connect)
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
	defer f.endpoint.answerTo(question) // also if nobody asked for it
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
	case neterror.Refused.Is(err), neterror.Reset.Is(err):
		return "the proxy's rules are gone, or another program's reject the packets: compare the rules with what the proxy would write, and look for reject in other tables"
	case neterror.NoDescriptors.Is(err):
		return "raise the limit of open files, or find the program that holds so many"
	case errors.Is(err, fs.ErrPermission):
		return "a rule at hook output, or a BPF program of the control group, forbids the connection"
	default:
		return "look at the rules and routes for the VIP"
	}
}
