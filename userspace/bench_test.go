package userspace

import (
	"context"
	"io"
	"net"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// BenchmarkThroughput measures one connection, without and with the proxy.
func BenchmarkThroughput(b *testing.B) {
	const chunk = 1 << 20
	sink, stop := source(b, chunk)
	defer stop()
	e, err := NewEngine(Config{}, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	if _, err := e.Apply(b.Context(), desired.Update{Full: true, Changes: desired.ChangesTo(web(v1.ProtocolTCP, addrPort(sink)))}); err != nil {
		b.Fatal(err)
	}
	for name, to := range map[string]string{"direct": sink.String(), "proxied": e.Sockets()[0].Addr.String()} {
		b.Run(name, func(b *testing.B) {
			conn, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", to)
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			b.SetBytes(chunk)
			buffer := make([]byte, 256<<10)
			for b.Loop() {
				if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.LimitReader(conn, chunk), buffer); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// source starts a server that sends until the client closes.
func source(b *testing.B, chunk int) (addr net.Addr, stop func()) {
	b.Helper()
	l, err := net.ListenTCP("tcp4", nil)
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		data := make([]byte, chunk)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				for {
					if _, err := conn.Write(data); err != nil {
						return
					}
				}
			}()
		}
	}()
	return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: l.Addr().(*net.TCPAddr).Port}, func() { _ = l.Close() }
}
