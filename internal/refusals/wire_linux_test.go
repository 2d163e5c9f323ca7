package refusals

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// wire sends packets from all hosts of a topology, and records what arrives at all of them. Of the
// node, it is what a program gets.
type wire struct {
	hosts   map[string]*proxiertest.Host
	senders map[string]wireSender

	mu       sync.Mutex
	sent     []*trial                     // by number
	accepted map[[2]netip.AddrPort]*trial // TCP, by both ends
}

// wireSender puts a packet into the network stack of a host.
type wireSender func(packet []byte, to netip.Addr) error

// receiveBuffer has room for what a slow reader has not read.
const receiveBuffer = 64 << 20

func newWire(t *testing.T, world *proxiertest.Topology) *wire {
	t.Helper()
	w := &wire{hosts: map[string]*proxiertest.Host{}, senders: map[string]wireSender{}, accepted: map[[2]netip.AddrPort]*trial{}}
	w.senders["node"] = ofNode(t, world.Node)
	w.senders["client"] = ontoLink(t, world.Client, "eth0", world.Node, "client")
	w.senders["router"] = ontoLink(t, world.Router, "uplink", world.Node, "uplink")
	hosts := append([]*proxiertest.Host{world.Client, world.Router}, world.RemotePods...)
	for i, pod := range world.LocalPods {
		w.senders[pod.Name] = ontoLink(t, pod, "eth0", world.Node, fmt.Sprintf("pod%d", i))
		hosts = append(hosts, pod)
	}
	for _, host := range hosts {
		w.capture(t, host)
	}
	w.program(t, world.Node)
	return w
}

// socket opens a socket in the network namespace of a host, until the test ends.
func socket(t *testing.T, host *proxiertest.Host, domain, kind, protocol int) (file *os.File) {
	t.Helper()
	err := host.Do(func() error {
		fd, err := unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
		if err == nil {
			file = os.NewFile(uintptr(fd), "packets of "+host.Name)
		}
		return err
	})
	if err != nil {
		t.Fatalf("open a packet socket in %s: %v", host.Name, err)
	}
	t.Cleanup(func() { _ = file.Close() })
	return file
}

// control calls f with the descriptor of a socket.
func control(file *os.File, f func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

const everyProtocol = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xff00 // big endian

// ontoLink sends as a host that is connected to the node, whatever the source address.
func ontoLink(t *testing.T, host *proxiertest.Host, name string, node *proxiertest.Host, nodeLink string) wireSender {
	t.Helper()
	var link, gateway *net.Interface
	err := errors.Join(
		host.Do(func() (err error) { link, err = net.InterfaceByName(name); return err }),
		node.Do(func() (err error) { gateway, err = net.InterfaceByName(nodeLink); return err }))
	if err != nil {
		t.Fatalf("find the links of %s: %v", host.Name, err)
	}
	file := socket(t, host, unix.AF_PACKET, unix.SOCK_RAW, 0)
	return func(packet []byte, _ netip.Addr) error {
		ethertype := uint16(unix.ETH_P_IP)
		if packet[0]>>4 == 6 {
			ethertype = unix.ETH_P_IPV6
		}
		frame := append(append([]byte{}, gateway.HardwareAddr...), link.HardwareAddr...)
		frame = append(binary.BigEndian.AppendUint16(frame, ethertype), packet...)
		return control(file, func(fd int) error {
			return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: link.Index, Halen: 6})
		})
	}
}

// ofNode sends as a process of the node.
func ofNode(t *testing.T, node *proxiertest.Host) wireSender {
	t.Helper()
	v4 := socket(t, node, unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
	v6 := socket(t, node, unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_RAW)
	return func(packet []byte, to netip.Addr) error {
		if to.Is4() {
			return control(v4, func(fd int) error { return unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: to.As4()}) })
		}
		return control(v6, func(fd int) error { return unix.Sendto(fd, packet, 0, &unix.SockaddrInet6{Addr: to.As16()}) })
	}
}

// capture records all that a host gets, from its IP header on.
func (w *wire) capture(t *testing.T, host *proxiertest.Host) {
	t.Helper()
	w.hosts[host.Name] = host
	file := socket(t, host, unix.AF_PACKET, unix.SOCK_DGRAM, everyProtocol)
	err := control(file, func(fd int) error {
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer),
			unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1))
	})
	if err != nil {
		t.Fatalf("set up the capture of %s: %v", host.Name, err)
	}
	stop := w.read(host.Name, file, parse)
	t.Cleanup(func() {
		err := control(file, func(fd int) error {
			stats, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
			if err == nil && stats.Drops > 0 {
				err = fmt.Errorf("%d packets were not captured", stats.Drops)
			}
			return err
		})
		if err != nil {
			t.Errorf("capture of %s: %v", host.Name, err)
		}
		stop()
	})
}

// programPort is where a program of the node listens, at all addresses.
const programPort = 29999

// program records the datagrams that a program of a host gets.
func (w *wire) program(t *testing.T, host *proxiertest.Host) {
	t.Helper()
	w.hosts[host.Name] = host
	for _, network := range []string{"udp4", "udp6"} {
		var listener net.PacketConn
		err := host.Do(func() (err error) {
			listener, err = (&net.ListenConfig{}).ListenPacket(t.Context(), network, fmt.Sprintf(":%d", programPort))
			return err
		})
		conn, ok := listener.(*net.UDPConn)
		if err != nil || !ok {
			t.Fatalf("listen on the node: %v", err)
		}
		t.Cleanup(w.read(host.Name, conn, func(payload []byte) (r receipt, ok bool) {
			r.number, ok = number(payload)
			return r, ok
		}))
	}
}

// read records what comes, until the function that it returns is called.
func (w *wire) read(name string, from io.ReadCloser, parse func([]byte) (receipt, bool)) (stop func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buffer := make([]byte, 2048)
		for {
			n, err := from.Read(buffer)
			if err != nil {
				return // closed
			}
			if r, ok := parse(buffer[:n]); ok {
				r.host = name
				w.record(r)
			}
		}
	}()
	return func() {
		_ = from.Close()
		<-ended
	}
}

func (w *wire) record(r receipt) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.accepted[[2]netip.AddrPort{r.to, r.from}]
	if !r.accepted {
		if r.number >= uint64(len(w.sent)) {
			return // of another test
		}
		s = w.sent[r.number]
		if r.host == nodeName {
			r.to = s.packet.destination
		}
	}
	if s != nil {
		s.record(r)
	}
}

// send numbers a packet and sends it. What the host itself refuses to send counts as sent.
func (w *wire) send(s *trial) {
	w.mu.Lock()
	s.packet.number = uint64(len(w.sent))
	w.sent = append(w.sent, s)
	if s.packet.protocol == unix.IPPROTO_TCP && s.packet.flags == syn {
		w.accepted[[2]netip.AddrPort{s.packet.source, s.packet.destination}] = s
	}
	w.mu.Unlock()
	s.err = w.senders[s.host](s.packet.bytes(), s.packet.destination.Addr())
}

// flush returns after all packets that were sent before have arrived, if they ever do: a last
// packet goes from each host to each other one, again if it gets lost.
func (w *wire) flush(t *testing.T) {
	t.Helper()
	left := map[string]packet{}
	for name := range w.senders {
		for other, host := range w.hosts {
			for is6 := range 2 {
				from, to := netip.AddrPortFrom(w.hosts[name].Addrs[is6], 9), netip.AddrPortFrom(host.Addrs[is6], programPort)
				if other != name {
					left[fmt.Sprintf("%s to %v", name, to)] = packet{protocol: unix.IPPROTO_UDP, source: from, destination: to}
				}
			}
		}
	}
	sent := map[string]*trial{}
	poll.Nil(t, "the last packets arrive", func() error {
		for way, p := range left {
			if last := sent[way]; last != nil && len(last.received()) > 0 {
				delete(left, way)
				continue
			}
			from, _, _ := strings.Cut(way, " ")
			sent[way] = &trial{sender: sender{host: from}, packet: p}
			w.send(sent[way])
		}
		if len(left) > 0 {
			return fmt.Errorf("missing: %v", slices.Collect(maps.Keys(left)))
		}
		return nil
	})
}

// onOneProcessor keeps the order of packets: each processor has a queue of its own.
func onOneProcessor(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if all.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.SchedSetaffinity(0, &all) }()
	f()
}
