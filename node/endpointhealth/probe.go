package endpointhealth

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/neterror"
)

// Probe checks an endpoint. Several goroutines call it at once. Values that are equal are the
// same check, so a Probe must be comparable.
type Probe interface {
	// Check returns nil if the endpoint works. It must return soon after ctx has ended, which
	// is after CheckPolicy.Timeout.
	Check(ctx context.Context, target Target) error
}

// Target is the endpoint of a check.
type Target struct {
	Addr     netip.AddrPort
	Protocol v1.Protocol
	// Dial connects in the network namespace of Options.NetNS. The connection has the deadline
	// of ctx. Its error does not repeat the address.
	Dial func(ctx context.Context, network string, address netip.AddrPort) (net.Conn, error)
}

// at replaces the port, unless it is 0.
func (t Target) at(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(t.Addr.Addr(), cmp.Or(port, t.Addr.Port()))
}

// TCPProbe is a Probe that connects and closes the connection.
type TCPProbe struct {
	// Port is where to connect; 0 means the port of the endpoint, which must be TCP.
	Port uint16
}

func (p TCPProbe) port() uint16 { return p.Port }

// Check implements Probe.
func (p TCPProbe) Check(ctx context.Context, target Target) error {
	conn, err := target.Dial(ctx, "tcp", target.at(p.Port))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // no socket in TIME_WAIT for each check
	}
	_ = conn.Close() // it has answered
	return nil
}

// HTTPProbe is a Probe that requests a page by GET. It does not follow redirects.
type HTTPProbe struct {
	// Port is where to connect; 0 means the port of the endpoint, which must be TCP.
	Port uint16
	// Path is the path, and the query after "?"; empty means "/".
	Path string
	// Host is the value of the header; empty means address and port.
	Host string
	// Status is the only status that is a success; 0 means any from 200 to 399, as for kubelet.
	Status int
}

func (p HTTPProbe) port() uint16 { return p.Port }

// Check implements Probe.
func (p HTTPProbe) Check(ctx context.Context, target Target) error {
	to := target.at(p.Port)
	page, err := url.ParseRequestURI(cmp.Or(p.Path, "/"))
	if err != nil {
		return fmt.Errorf("parse path: %w", err)
	}
	page.Scheme, page.Host = "http", to.String()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, page.String(), http.NoBody)
	if err != nil {
		return fmt.Errorf("request: %w", err)
	}
	request.Host, request.Close = p.Host, true
	request.Header.Set("User-Agent", "serviceplane-endpointhealth")
	conn, err := target.Dial(ctx, "tcp", to)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close() }()
	var text bytes.Buffer
	if err := request.Write(&text); err != nil {
		return fmt.Errorf("request: %w", err)
	}
	if _, err := conn.Write(text.Bytes()); err != nil {
		return fmt.Errorf("send: %w", cause(err))
	}
	const longestHeader, usualHeader = 1 << 16, 1 << 10
	response, err := http.ReadResponse(bufio.NewReaderSize(io.LimitReader(conn, longestHeader), usualHeader), request)
	if err != nil {
		return fmt.Errorf("receive: %w", cause(err))
	}
	_ = response.Body.Close()
	if got := response.StatusCode; got != p.Status && (p.Status != 0 || got < http.StatusOK || got >= http.StatusBadRequest) {
		return fmt.Errorf("status %d", got)
	}
	return nil
}

// Func returns a Probe that calls a function. Each call of Func makes another Probe: make one,
// and return it in all Policies, or checks are not shared.
func Func(check func(ctx context.Context, target Target) error) Probe { return &hook{check} }

type hook struct {
	check func(ctx context.Context, target Target) error
}

// Check implements Probe.
func (h *hook) Check(ctx context.Context, target Target) error { return h.check(ctx, target) }

var errTimeout = errors.New("no answer in time")

// cause removes the addresses, of which the port changes at each check.
func cause(err error) error {
	if o, ok := errors.AsType[*net.OpError](err); ok {
		err = o.Err
	}
	if s, ok := errors.AsType[*os.SyscallError](err); ok {
		err = s.Err
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return errTimeout
	}
	return err
}

// isLocal reports whether an error says nothing about the endpoint: this process has no
// descriptor, memory, port or permission for the check.
func isLocal(err error) bool {
	for _, local := range []error{fs.ErrPermission, fs.ErrNotExist, context.Canceled, net.ErrClosed} {
		if errors.Is(err, local) {
			return true
		}
	}
	return neterror.NoDescriptors.Is(err) || neterror.NoMemory.Is(err) || neterror.NotAvailable.Is(err)
}

// dial connects in the network namespace of Options.NetNS.
func (c *run) dial(ctx context.Context, network string, to netip.AddrPort) (conn net.Conn, err error) {
	err = c.threads.Visit(func() error {
		dialer := net.Dialer{KeepAlive: -1}
		conn, err = dialer.DialContext(ctx, network, to.String())
		return err
	})
	if err != nil {
		return nil, cause(err)
	}
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	return conn, nil
}
