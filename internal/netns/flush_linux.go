package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hops is how many queues a packet and its answer may pass, with requests for link-layer addresses
// and with room.
const hops = 32

// Flush returns when the kernel has handled all packets that this process sent before, and what
// followed from them: each is in the queue of a socket, answered, or dropped.
//
// A virtual cable and a loopback device append a packet to a queue of the processor that sends it, and
// the kernel handles each queue in order (netif_rx). So a datagram that passes the queue of each
// processor once a hop comes last.
func Flush() error {
	var processors unix.CPUSet
	if err := unix.SchedGetaffinity(0, &processors); err != nil {
		return fmt.Errorf("list the processors: %w", err)
	}
	const words = len(processors)
	errs := make([]error, words*64)
	var all sync.WaitGroup
	for i := range errs {
		if processors.IsSet(i) {
			all.Go(func() { errs[i] = pass(i, &processors) })
		}
	}
	all.Wait()
	return errors.Join(errs...)
}

// pass sends datagrams to itself through the queue of one processor, one after the other.
func pass(processor int, home *unix.CPUSet) (err error) {
	runtime.LockOSThread()
	var only unix.CPUSet
	only.Set(processor)
	if err := unix.SchedSetaffinity(0, &only); err != nil {
		return fmt.Errorf("move to processor %d: %w", processor, err)
	}
	defer func() { // a thread that stays locked ends with its goroutine
		if restoreErr := unix.SchedSetaffinity(0, home); restoreErr == nil {
			runtime.UnlockOSThread()
		}
	}()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	if err := loop(fd); err != nil {
		return fmt.Errorf("datagrams at 127.0.0.1, processor %d: %w", processor, err)
	}
	return nil
}

func loop(fd int) error {
	limit := unix.NsecToTimeval(defaultTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return fmt.Errorf("limit the wait: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	self, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("read the address: %w", err)
	}
	if err := unix.Connect(fd, self); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	buffer := make([]byte, 1)
	for range hops {
		if _, err := unix.Write(fd, buffer); err != nil {
			return fmt.Errorf("send: %w", err)
		}
		if err := receive(fd, buffer); err != nil {
			return err
		}
	}
	return nil
}

// receive repeats what the signals of the Go runtime interrupt.
func receive(fd int, buffer []byte) error {
	for {
		if _, err := unix.Read(fd, buffer); err == nil {
			return nil
		} else if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("receive: %w", err)
		}
	}
}

// Flush returns when the server has answered all datagrams that reached its sockets before.
func (s *Server) Flush(ctx context.Context) error {
	for _, at := range s.local {
		if _, err := Ask(ctx, s.ns, "udp", at, AskOptions{}); err != nil {
			return fmt.Errorf("ask %s at %s: %w", s.name, at, err)
		}
	}
	return nil
}

// errSilent is why a request ends that Flusher has shown to have no answer.
var errSilent = fmt.Errorf("%w: the kernel handled the packets, and none came back", ErrTimeout)

// dial connects. If no answer is expected, it ends with errSilent once the SYN is handled, and the
// socket has heard nothing.
func (o *AskOptions) dial(ctx context.Context, dialer *net.Dialer, network string, to netip.AddrPort) (net.Conn, error) {
	if o.Flusher == nil || network != "tcp" {
		return dialer.DialContext(ctx, network, to.String())
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	sockets := make(chan syscall.RawConn, 1)
	control := dialer.Control
	dialer.Control = func(network, address string, raw syscall.RawConn) error {
		sockets <- raw
		return control(network, address, raw)
	}
	var (
		watching sync.WaitGroup
		silent   error
	)
	ended := make(chan struct{})
	watching.Go(func() {
		if silent = o.silent(ctx, sockets, ended); silent != nil {
			stop()
		}
	})
	conn, err := dialer.DialContext(ctx, network, to.String())
	close(ended)
	watching.Wait()
	if err != nil && silent != nil {
		return nil, silent
	}
	return conn, err
}

// silent returns errSilent if a socket's SYN leads to nothing, nil if to something or if dialing has ended.
func (o *AskOptions) silent(ctx context.Context, sockets <-chan syscall.RawConn, ended <-chan struct{}) error {
	var socket syscall.RawConn
	select {
	case socket = <-sockets:
	case <-ended:
		return nil
	}
	for !isSYNSent(socket) { // the kernel holds the lock of the socket until the SYN is sent
		select {
		case <-ended:
			return nil
		case <-time.After(time.Millisecond):
		}
	}
	if err := o.Flusher.Flush(ctx); err != nil || !isSYNSent(socket) {
		return err
	}
	return errSilent
}

// isSYNSent reports whether a socket has sent its SYN and heard nothing. A closed one has not.
func isSYNSent(socket syscall.RawConn) bool {
	info, err := tcpInfo(socket)
	return err == nil && info.State == unix.BPF_TCP_SYN_SENT
}

func tcpInfo(socket syscall.RawConn) (info *unix.TCPInfo, err error) {
	err = control(socket, func(fd int) (err error) {
		info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err
	})
	return info, err
}

// heard returns nil if a datagram waits in the queue of a socket, the error that a packet brought, or errSilent.
func heard(conn net.Conn) error {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return fmt.Errorf("peek: unexpected %T", conn)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return fmt.Errorf("peek: %w", err)
	}
	err = control(raw, func(fd int) error {
		_, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return err
	})
	if errors.Is(err, unix.EAGAIN) {
		return errSilent
	}
	return err
}
