package packetcost

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// Clients and servers use blocking system calls: the scheduler of Go would cost more than most
// packets.

func tcpSocket() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		// No connection stays in TIME_WAIT.
		err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
			unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	}
	return fd, err
}

func sockaddr(to netip.AddrPort) unix.Sockaddr {
	return &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
}

const longest = 256 << 10

// serve answers at a port until the end of the benchmark: over TCP one connection after the other,
// over UDP one datagram after the other. It sends back single bytes, and swallows the rest.
func serve(b *testing.B, host *proxiertest.Host, port uint16) {
	b.Helper()
	var fds []int
	netnstest.Check(b, host.Do(func() error {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			fds = append(fds, fd)
			if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(port)}); err != nil {
				return err
			}
		}
		return unix.Listen(fds[0], 1024)
	}))
	var running sync.WaitGroup
	running.Go(func() {
		buffer := make([]byte, longest)
		for {
			fd, _, err := unix.Accept(fds[0])
			if err != nil {
				if errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EINTR) {
					continue
				}
				return // shut down
			}
			_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
			for {
				n, err := again(func() (int, error) { return unix.Read(fd, buffer) })
				if err != nil || n == 0 {
					break
				}
				if n == 1 {
					_, _ = unix.Write(fd, buffer[:1])
				}
			}
			_ = unix.Close(fd)
		}
	})
	running.Go(func() {
		buffer := make([]byte, 2048)
		for {
			var from unix.Sockaddr
			n, err := again(func() (n int, err error) {
				n, from, err = unix.Recvfrom(fds[1], buffer, 0)
				return n, err
			})
			if err != nil || n == 0 {
				return // shut down
			}
			if n == 1 {
				_ = unix.Sendto(fds[1], buffer[:1], 0, from)
			}
		}
	})
	b.Cleanup(func() {
		for _, fd := range fds {
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
		running.Wait()
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
	})
}

// connects returns the times of connect(2).
func connects(to netip.AddrPort, n int) (all []time.Duration, err error) {
	for range n {
		fd, err := tcpSocket()
		if err != nil {
			return nil, err
		}
		began := time.Now()
		err = unix.Connect(fd, sockaddr(to))
		all = append(all, time.Since(began))
		if err = errors.Join(err, unix.Close(fd)); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// again repeats a system call that a signal of the scheduler has interrupted.
func again(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// exchange sends a byte and waits for it.
func exchange(fd int) error {
	one := []byte{'?'}
	_, err := again(func() (int, error) { return unix.Write(fd, one) })
	if err == nil {
		_, err = again(func() (int, error) { return unix.Read(fd, one) })
	}
	return err
}

// requests returns the time of a request over an open connection, or UDP flow.
func requests(kind int, to netip.AddrPort, n int) (time.Duration, error) {
	fd, err := open(kind, to)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for range n {
		if err = exchange(fd); err != nil {
			break
		}
	}
	took := time.Since(began) / time.Duration(n)
	return took, errors.Join(err, unix.Close(fd))
}

// open returns a connection, or UDP flow, that has carried a request.
func open(kind int, to netip.AddrPort) (fd int, err error) {
	if kind == unix.SOCK_STREAM {
		fd, err = tcpSocket()
	} else if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})
	}
	if err != nil {
		return fd, err
	}
	if err = unix.Connect(fd, sockaddr(to)); err == nil {
		err = exchange(fd)
	}
	if err != nil {
		return fd, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// connectRequests returns the time of a connection with one request.
func connectRequests(to netip.AddrPort, n int) (time.Duration, error) {
	began := time.Now()
	for range n {
		fd, err := open(unix.SOCK_STREAM, to)
		if err == nil {
			err = unix.Close(fd)
		}
		if err != nil {
			return 0, err
		}
	}
	return time.Since(began) / time.Duration(n), nil
}

// rate sends pieces over an open connection or UDP flow, and returns how many of them a second.
func rate(kind int, to netip.AddrPort, size int, during time.Duration) (float64, error) {
	fd, err := open(kind, to)
	if err != nil {
		return 0, err
	}
	piece, n := make([]byte, size), 0
	began := time.Now()
	for ; time.Since(began) < during && err == nil; n++ {
		_, err = again(func() (int, error) { return unix.Write(fd, piece) })
	}
	return float64(n) / time.Since(began).Seconds(), errors.Join(err, unix.Close(fd))
}

// firstPackets returns the CPU time of the first packet of a UDP flow, on the whole way. Sources are
// not real: no two flows are the same.
func firstPackets(from netip.Addr, to netip.AddrPort, first, n int) (time.Duration, error) {
	raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return 0, err
	}
	before := cpuTime()
	for i := range n {
		p := datagram(from, to, uint16(1024+(first+i)%60000))
		if err = unix.Sendto(raw, p, 0, sockaddr(to)); err != nil {
			break
		}
	}
	took := (cpuTime() - before) / time.Duration(n)
	return took, errors.Join(err, unix.Close(raw))
}

// datagram is an IP packet with UDP, without a checksum.
func datagram(from netip.Addr, to netip.AddrPort, port uint16) []byte {
	const headers, payload = 20 + 8, 2
	p := make([]byte, headers+payload)
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	copy(p[12:], from.AsSlice())
	copy(p[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(p[20:], port)
	binary.BigEndian.PutUint16(p[22:], to.Port())
	binary.BigEndian.PutUint16(p[24:], 8+payload)
	return p
}

func cpuTime() time.Duration {
	var usage unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// at returns the value below which a share of all lie.
func at(share float64, all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[min(len(all)-1, int(share*float64(len(all))))]
}
