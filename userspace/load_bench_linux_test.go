package userspace

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// partVariable makes this program one part of a benchmark. Clients and servers are other
// processes and use plain system calls, so that the benchmark compares only the proxies.
const partVariable = "SERVICEPLANE_BENCH_PART"

// The request and the answer of a short connection.
const (
	requestSize = 100
	answerSize  = 200
)

// startPart starts a part, which ends with the benchmark, and returns its first line.
func startPart(tb testing.TB, args ...any) (line string) {
	tb.Helper()
	// Not tb.Context, which would kill the part before its standard input ends.
	ctx, kill := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestBenchmarkPart$", "-test.timeout=0")
	cmd.Env = append(os.Environ(), partVariable+"="+strings.TrimSpace(fmt.Sprintln(args...)))
	cmd.Stderr = os.Stderr
	life, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		tb.Fatalf("start part %v: %v", args, err)
	}
	tb.Cleanup(func() {
		_ = life.Close() // ends the part; so does the end of this process
		late := time.AfterFunc(patience, kill)
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		late.Stop()
		kill()
	})
	if line, err = bufio.NewReader(out).ReadString('\n'); err != nil {
		tb.Fatalf("part %v: %v", args, err)
	}
	return strings.TrimSpace(line)
}

// startServer starts a part that prints its address.
func startServer(tb testing.TB, args ...any) netip.AddrPort {
	tb.Helper()
	line := startPart(tb, args...)
	addr, err := netip.ParseAddrPort(line)
	if err != nil {
		tb.Fatalf("part %v prints %q, want an address", args, line)
	}
	return addr
}

// startMeter starts a part that measures, and returns its result.
func startMeter(tb testing.TB, args ...any) float64 {
	tb.Helper()
	line := startPart(tb, args...)
	figure, err := strconv.ParseFloat(line, 64)
	if err != nil {
		tb.Fatalf("part %v prints %q, want a number", args, line)
	}
	return figure
}

// This is no test: parts of benchmarks run it.
func TestBenchmarkPart(*testing.T) {
	args := strings.Fields(os.Getenv(partVariable))
	if len(args) == 0 {
		return
	}
	if args[0] == "nginx" {
		part{}.nginx(args[1:])
		return
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	part{}.run(args)
	os.Exit(0) // goroutines and sockets end here
}

func (p part) run(args []string) {
	switch args[0] {
	case "answer":
		p.answer()
	case "source":
		p.each(p.source)
	case "splice":
		p.each(func(client int) { p.splice(client, p.dial(args[1])) })
	case "ask":
		p.ask(args[1], p.number(args[2]), time.Duration(p.number(args[3])))
	case "pull":
		p.pull(args[1], time.Duration(p.number(args[2])))
	case "listen":
		p.listenIdle(args[1])
	case "hold":
		p.hold(args[1], args[2], p.number(args[3]))
	default:
		p.check("run "+args[0], os.ErrInvalid)
	}
}

// part is one part of a benchmark.
type part struct{}

func (part) say(what any) { _, _ = fmt.Fprintln(os.Stdout, what) }

func (part) check(what string, err error) {
	if err != nil {
		_, _ = fmt.Fprintf(os.Stderr, "%s: %v\n", what, err)
		os.Exit(1)
	}
}

func (p part) number(text string) int {
	n, err := strconv.Atoi(text)
	p.check("parse number", err)
	return n
}

// listen returns a listening socket, and prints its address.
func (p part) listen() (fd int) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	p.check("socket", err)
	p.check("bind", unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	p.check("listen", unix.Listen(fd, 4096))
	at, err := unix.Getsockname(fd)
	p.check("getsockname", err)
	p.say(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(at.(*unix.SockaddrInet4).Port)))
	return fd
}

// dial returns a connected socket that blocks.
func (p part) dial(to string) (fd int) {
	addr, err := netip.ParseAddrPort(to)
	p.check("parse address", err)
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	p.check("socket", err)
	p.check("connect", unix.Connect(fd, &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}))
	return fd
}

// each serves one connection after the other.
func (p part) each(serve func(fd int)) {
	l := p.listen()
	for {
		fd, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		p.check("accept", err)
		serve(fd)
		p.check("close", unix.Close(fd))
	}
}

// source sends until the client closes.
func (p part) source(fd int) {
	data := make([]byte, 256<<10)
	for {
		if _, err := unix.SendmsgN(fd, data, nil, nil, unix.MSG_NOSIGNAL); err != nil {
			return
		}
	}
}

// splice forwards from a server with the fewest system calls, in one blocking thread. It
// is no strict limit: in some rounds a proxy is a little faster.
func (p part) splice(client, server int) {
	defer unix.Close(server)
	const size = 1 << 20
	var pipe [2]int
	p.check("pipe", unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	_, err := unix.FcntlInt(uintptr(pipe[0]), unix.F_SETPIPE_SZ, size)
	p.check("size of pipe", err)
	for {
		n, err := unix.Splice(server, nil, pipe[1], nil, size, unix.SPLICE_F_MOVE)
		for n > 0 && err == nil {
			var m int64
			m, err = unix.Splice(pipe[0], nil, client, nil, int(n), unix.SPLICE_F_MOVE)
			n -= m
		}
		if err != nil {
			return
		}
	}
}

// pull measures the bytes per second of one connection, without copying them to user
// space.
func (p part) pull(from string, length time.Duration) {
	fd := p.dial(from)
	buffer := make([]byte, 1<<20)
	var total int
	begin := time.Now()
	for warm := false; ; {
		n, _, err := unix.Recvfrom(fd, buffer, unix.MSG_TRUNC)
		p.check("recv", err)
		total += n
		took := time.Since(begin)
		switch {
		case !warm && took > length/4: // the TCP windows are open now
			warm, total, begin = true, 0, time.Now()
		case warm && took > length:
			p.say(float64(total) / took.Seconds())
			p.check("close", unix.Close(fd))
			return
		}
	}
}

// poller waits for sockets to become readable.
type poller struct {
	part
	fd     int
	events [256]unix.EpollEvent
}

func (p part) poller() *poller {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	p.check("epoll_create", err)
	return &poller{part: p, fd: fd}
}

func (p *poller) add(fd int) {
	p.check("epoll_ctl", unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}))
}

func (p *poller) wait() []unix.EpollEvent {
	for {
		n, err := unix.EpollWait(p.fd, p.events[:], -1)
		if err == unix.EINTR {
			continue
		}
		p.check("epoll_wait", err)
		return p.events[:n]
	}
}

// answer answers one request on each connection.
func (p part) answer() {
	l, poll := p.listen(), p.poller()
	poll.add(l)
	request, answer := make([]byte, requestSize), make([]byte, answerSize)
	for {
		for _, event := range poll.wait() {
			fd := int(event.Fd)
			if fd == l {
				conn, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
				p.check("accept", err)
				poll.add(conn)
				continue
			}
			if n, err := unix.Read(fd, request); err == nil && n > 0 {
				_, _ = unix.SendmsgN(fd, answer, nil, nil, unix.MSG_NOSIGNAL)
			}
			p.check("close", unix.Close(fd))
		}
	}
}

// ask measures the connections per second of several clients, each with a request and an
// answer.
func (p part) ask(to string, clients int, length time.Duration) {
	poll := p.poller()
	request, answer := make([]byte, requestSize), make([]byte, 4096)
	heard := map[int]int{}
	ask := func() {
		fd := p.dial(to)
		_, err := unix.Write(fd, request)
		p.check("write", err)
		poll.add(fd)
	}
	for range clients {
		ask()
	}
	var done int
	begin := time.Now()
	for warm := false; ; {
		for _, event := range poll.wait() {
			fd := int(event.Fd)
			n, err := unix.Read(fd, answer)
			p.check("read", err)
			if heard[fd] += n; n > 0 {
				continue
			}
			if heard[fd] != answerSize {
				p.check("hear all of the answer", io.ErrUnexpectedEOF)
			}
			delete(heard, fd)
			p.check("close", unix.Close(fd))
			done++
			ask()
		}
		took := time.Since(begin)
		switch {
		case !warm && took > length/4:
			warm, done, begin = true, 0, time.Now()
		case warm && took > length:
			p.say(float64(done) / took.Seconds())
			return
		}
	}
}

// listenIdle accepts TCP connections and keeps them open, or echoes datagrams.
func (p part) listenIdle(network string) {
	if network == "tcp" {
		l := p.listen()
		for {
			_, _, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
			p.check("accept", err)
		}
	}
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	p.check("listen", err)
	p.say(conn.LocalAddr())
	buffer := make([]byte, requestSize)
	for {
		n, from, err := conn.ReadFrom(buffer)
		p.check("read", err)
		_, err = conn.WriteTo(buffer[:n], from)
		p.check("write", err)
	}
}

// hold opens connections, or sends a datagram from as many sockets, and keeps them open.
func (p part) hold(network, to string, n int) {
	conns := make([]net.Conn, n)
	for i := range conns {
		conn, err := net.Dial(network, to)
		p.check("dial", err)
		if conns[i] = conn; network == "udp" {
			_, err = conn.Write(make([]byte, requestSize))
			p.check("write", err)
			_, err = conn.Read(make([]byte, requestSize))
			p.check("read", err)
		}
	}
	p.say("open")
	select {}
}

// nginx runs nginx, and ends it with this process.
func (p part) nginx(args []string) {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stderr = os.Stderr
	p.check("start nginx", cmd.Start())
	p.say("started")
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = cmd.Process.Signal(unix.SIGTERM)
	p.check("nginx", cmd.Wait())
}
