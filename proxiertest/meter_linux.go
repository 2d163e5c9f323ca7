package proxiertest

import (
	"encoding/binary"
	"net/netip"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// meter counts the packets that a host sends and receives, by flow. The bytes are those of IP.
type meter struct {
	mu    sync.Mutex // guards flows
	flows map[wire]metered
}

// metered are the packets of a flow. In is what its client has sent.
type metered struct {
	connection.Traffic

	// sent and acknowledged are sequence numbers of TCP, of the client (0) and of its server (1).
	sent, acknowledged [2]uint32
	// begun are the first packets of TCP, by sender. The kernel does not count some that are repeated.
	begun [2]int
}

// isQuiet reports whether both ends have acknowledged what they got. Some do so later.
func (m metered) isQuiet() bool { return m.sent == m.acknowledged }

// hasRepeated reports whether an end began the flow with more than one packet.
func (m metered) hasRepeated() bool { return max(m.begun[0], m.begun[1]) > 1 }

// wire is a flow as its client sees it.
type wire struct {
	network        string
	client, target netip.AddrPort
}

// newMeter counts until the end of the test.
func newMeter(tb testing.TB, host *Host) *meter {
	tb.Helper()
	const everyProtocol = 0x0300 // ETH_P_ALL in network byte order
	var file *os.File
	netnstest.Check(tb, host.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, everyProtocol)
		if err == nil {
			file = os.NewFile(uintptr(fd), "packets of "+host.Name)
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) // packets must not be lost
		}
		return err
	}))
	conn, err := file.SyscallConn()
	netnstest.Check(tb, err)
	m := &meter{flows: map[wire]metered{}}
	var reading sync.WaitGroup
	reading.Go(func() {
		packet := make([]byte, 256)
		_ = conn.Read(func(fd uintptr) bool { // until Close
			for {
				n, from, err := unix.Recvfrom(int(fd), packet, unix.MSG_TRUNC)
				if err != nil {
					return false
				}
				if link, ok := from.(*unix.SockaddrLinklayer); ok {
					m.add(packet[:min(n, len(packet))], uint64(n), link.Pkttype == unix.PACKET_OUTGOING)
				}
			}
		})
	})
	tb.Cleanup(func() {
		_ = file.Close()
		reading.Wait()
	})
	return m
}

// of returns the packets of a flow up to now.
func (m *meter) of(flow wire) metered {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.flows[flow]
}

// add adds a packet, of which b is the beginning.
func (m *meter) add(b []byte, size uint64, out bool) {
	head := b
	var source, destination netip.Addr
	var protocol byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		source, destination, protocol = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:])), b[9]
		b = b[min(int(b[0]&15)*4, len(b)):]
	case len(b) >= 40 && b[0]>>4 == 6:
		source, destination, protocol = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:])), b[6]
		b = b[40:]
	}
	payload := size - (uint64(len(head)) - uint64(len(b)))
	network := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[protocol]
	if network == "" || len(b) < 4 {
		return
	}
	flow := wire{network, netip.AddrPortFrom(source, binary.BigEndian.Uint16(b)), netip.AddrPortFrom(destination, binary.BigEndian.Uint16(b[2:]))}
	more := connection.Traffic{PacketsIn: 1, BytesIn: size}
	if !out {
		flow.client, flow.target = flow.target, flow.client
		more = connection.Traffic{PacketsOut: 1, BytesOut: size}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.flows[flow]
	now.Traffic = now.Plus(more)
	if network == "tcp" && len(b) >= 20 {
		now.follow(b, uint32(payload), out)
	}
	m.flows[flow] = now
}

// follow takes over the numbers of a TCP packet.
func (m *metered) follow(header []byte, length uint32, out bool) {
	const fin, syn, reset = 1, 2, 4
	sender, flags := 0, uint32(header[13])
	if !out {
		sender = 1
	}
	later := func(before, number uint32) uint32 { // some packets repeat earlier ones
		if before != 0 && int32(number-before) < 0 {
			return before
		}
		return number
	}
	m.begun[sender] += int(flags & syn / syn)
	end := binary.BigEndian.Uint32(header[4:]) + length - 4*uint32(header[12]>>4) + flags&fin + flags&syn/syn
	m.sent[sender] = later(m.sent[sender], end)
	m.acknowledged[1-sender] = later(m.acknowledged[1-sender], binary.BigEndian.Uint32(header[8:]))
	if flags&reset != 0 {
		m.acknowledged = m.sent
	}
}
