package coexistence

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
)

// envoyUser is the user that Istio runs Envoy as, and outbound the port that all TCP
// connections of the pod are redirected to.
const envoyUser, outbound = 1337, ":15001"

// sidecar makes a pod of the mesh of the one that probes dial from: Istio's rules, and a
// proxy in Envoy's place, which dials the original destination.
func (w *world) sidecar() {
	pod := w.net.LocalPods[1]
	w.pod = newSandbox(w.t, trixie, pod)
	w.prefer(w.pod)
	w.reloadSidecar()
	e := &envoy{pod: pod}
	check(w.t, pod.Do(func() (err error) {
		e.listener, err = (&net.ListenConfig{}).Listen(w.t.Context(), "tcp", outbound)
		return err
	}))
	e.all.Go(e.accept)
	w.t.Cleanup(func() {
		_ = e.listener.Close()
		e.all.Wait()
	})
}

// reloadSidecar writes the rules in the pod.
func (w *world) reloadSidecar() { w.restore(w.pod, "istio") }

type envoy struct {
	pod      doer
	listener net.Listener
	all      sync.WaitGroup
}

func (e *envoy) accept() {
	for {
		conn, err := e.listener.Accept()
		if err != nil {
			return
		}
		e.all.Go(func() { e.relay(conn.(*net.TCPConn)) })
	}
}

func (e *envoy) relay(from *net.TCPConn) {
	defer from.Close()
	target, err := originalDestination(from)
	if err != nil {
		return
	}
	var to net.Conn
	err = e.pod.Do(func() (err error) {
		// The socket's owner is the thread's user for files.
		if err := unix.Setfsuid(envoyUser); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, unix.Setfsuid(0)) }()
		to, err = net.Dial("tcp", target.String())
		return err
	})
	if err != nil {
		return
	}
	defer to.Close()
	var both sync.WaitGroup
	both.Go(func() {
		_, _ = io.Copy(to, from)
		_ = to.(*net.TCPConn).CloseWrite()
	})
	_, _ = io.Copy(from, to)
	_ = from.CloseWrite()
	both.Wait()
}

// originalDestination asks conntrack where the client wanted to go.
func originalDestination(conn *net.TCPConn) (to netip.AddrPort, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return to, err
	}
	local := conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	controlErr := raw.Control(func(fd uintptr) {
		if local.Is4() {
			var a *unix.IPv6Mreq // its first bytes are a sockaddr_in: family, port, address
			if a, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); err == nil {
				to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(a.Multiaddr[4:8])), binary.BigEndian.Uint16(a.Multiaddr[2:4]))
			}
			return
		}
		var a *unix.IPv6MTUInfo
		if a, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, unix.SO_ORIGINAL_DST); err == nil {
			port := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, a.Addr.Port))
			to = netip.AddrPortFrom(netip.AddrFrom16(a.Addr.Addr), port)
		}
	})
	return to, errors.Join(err, controlErr)
}
