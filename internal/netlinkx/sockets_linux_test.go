package netlinkx_test

import (
	"net"
	"net/netip"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestASocketIsHeldUntilItIsClosed: the other end still has it, and a socket that listens is none of a connection.
func TestASocketIsHeldUntilItIsClosed(t *testing.T) {
	for _, loopback := range []string{"127.0.0.1", "::1"} {
		ns := netnstest.New(t)
		sockets, err := netlinkx.DialSockets(ns.Path())
		netnstest.Check(t, err)
		defer func() { _ = sockets.Close() }()
		var listener net.Listener
		var client, server net.Conn
		netnstest.Check(t, ns.Do(func() (err error) {
			if listener, err = net.Listen("tcp", net.JoinHostPort(loopback, "0")); err != nil {
				return err
			}
			client, err = net.Dial("tcp", listener.Addr().String())
			return err
		}))
		server, err = listener.Accept()
		netnstest.Check(t, err)
		at, from := netip.MustParseAddrPort(listener.Addr().String()), netip.MustParseAddrPort(client.LocalAddr().String())
		mustHave := func(want bool, local, remote netip.AddrPort, when string) {
			t.Helper()
			if has, err := sockets.HasSocket(t.Context(), local, remote); has != want || err != nil {
				t.Errorf("%s: %v to %v is held: %t, error %v; want %t", when, local, remote, has, err, want)
			}
		}
		mustHave(true, at, from, "open")
		mustHave(true, from, at, "open")
		mustHave(false, at, netip.AddrPortFrom(from.Addr(), from.Port()^1), "another client")
		netnstest.Check(t, server.Close())
		mustHave(false, at, from, "closed here")
		mustHave(true, from, at, "closed there")
		netnstest.Check(t, client.Close())
		netnstest.Check(t, listener.Close())
		mustHave(false, from, at, "closed")
	}
}
