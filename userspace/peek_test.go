package userspace

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// host returns the host of an HTTP request, as far as it needs to read.
func host(c Connection) (string, error) {
	for read := []byte(nil); ; {
		var err error
		if read, err = c.Peek(len(read)+1, poll.Timeout); err != nil {
			return "", err
		}
		if bytes.Contains(read, []byte("\r\n\r\n")) {
			request, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(read)))
			if err != nil {
				return "", err
			}
			return request.Host, nil
		}
	}
}

// TestTheHostChoosesTheEndpoint: Pick sees an HTTP request that comes in pieces, and the endpoint gets all of it.
func TestTheHostChoosesTheEndpoint(t *testing.T) {
	t.Parallel()
	byHost := map[string]netip.AddrPort{}
	for _, name := range []string{"a.example", "b.example"} {
		byHost[name] = server(t, func(conn *net.TCPConn) {
			request, err := http.ReadRequest(bufio.NewReader(conn))
			if err == nil {
				body, _ := io.ReadAll(request.Body)
				fmt.Fprintf(conn, "%s got %s of %s", name, body, request.Host)
			}
			_ = conn.Close()
		})
	}
	pick := func(c Connection, _, _ []netip.AddrPort) (netip.AddrPort, bool) {
		name, err := host(c)
		endpoint, ok := byHost[name]
		return endpoint, ok && err == nil
	}
	e, heard := observed(t, Config{Hooks: Hooks{Pick: pick}})
	apply(t, e, web(v1.ProtocolTCP, byHost["a.example"], byHost["b.example"]))
	for name, endpoint := range byHost {
		conn, err := net.Dial("tcp", at(t, e, RoleInternal).String())
		if err != nil {
			t.Fatal(err)
		}
		request := "POST / HTTP/1.1\r\nHost: " + name + "\r\nContent-Length: 4\r\n\r\nbody"
		for _, piece := range []string{request[:7], request[7:30], request[30:]} {
			if _, err := io.WriteString(conn, piece); err != nil {
				t.Fatal(err)
			}
		}
		answer, err := io.ReadAll(conn)
		if want := name + " got body of " + name; err != nil || string(answer) != want {
			t.Errorf("answer %q, %v, want %q", answer, err, want)
		}
		_ = conn.Close()
		if r := heard.next(t); r.Endpoint != endpoint || r.Sent != int64(len(request)) || r.Outcome != connection.Served {
			t.Errorf("report %+v, want the endpoint of the host, and %d bytes from the client", r, len(request))
		}
	}
}

// Peek ends after its timeout, when the client sends no more, and with the engine. The endpoint still gets what was
// read before.
func TestPeekEnds(t *testing.T) {
	t.Parallel()
	var got atomic.Pointer[error]
	var timeout time.Duration
	pick := func(c Connection, endpoints, _ []netip.AddrPort) (netip.AddrPort, bool) {
		_, err := c.Peek(100, timeout)
		got.Store(&err)
		return endpoints[0], true
	}
	echo := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn); _ = conn.Close() })
	for name, c := range map[string]struct {
		timeout time.Duration
		closes  bool
		want    error
	}{
		"the timeout":              {timeout: time.Millisecond, want: os.ErrDeadlineExceeded},
		"the client sends no more": {timeout: poll.Timeout, closes: true, want: io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			timeout = c.timeout
			e, _ := observed(t, Config{Hooks: Hooks{Pick: pick}})
			apply(t, e, web(v1.ProtocolTCP, echo))
			conn, err := net.Dial("tcp", at(t, e, RoleInternal).String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := io.WriteString(conn, "hello"); err != nil {
				t.Fatal(err)
			}
			if c.closes {
				_ = conn.(*net.TCPConn).CloseWrite()
			}
			answer := make([]byte, 5)
			if _, err := io.ReadFull(conn, answer); err != nil || string(answer) != "hello" {
				t.Errorf("answer %q, %v, want what was sent", answer, err)
			}
			if err := *got.Load(); !errors.Is(err, c.want) {
				t.Errorf("Peek returned %v, want %v", err, c.want)
			}
		})
	}
	t.Run("the engine ends", func(t *testing.T) {
		timeout = poll.Timeout
		got.Store(nil)
		begun := make(chan struct{})
		e, _ := observed(t, Config{Hooks: Hooks{Pick: func(c Connection, all, tried []netip.AddrPort) (netip.AddrPort, bool) {
			close(begun)
			return pick(c, all, tried)
		}}})
		apply(t, e, web(v1.ProtocolTCP, echo))
		conn, err := net.Dial("tcp", at(t, e, RoleInternal).String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		<-begun
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if err := *got.Load(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Peek returned %v, want %v", err, net.ErrClosed)
		}
	})
	if _, err := (Connection{}).Peek(1, 0); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Peek of UDP returned %v", err)
	}
}

// A dial has as many attempts as there are timeouts, and invalid timeouts are named.
func TestDialTimeoutsAreTheAttempts(t *testing.T) {
	t.Parallel()
	var attempts atomic.Int32
	refuse := func(ctx context.Context, _ Connection, _ netip.AddrPort) (net.Conn, error) {
		attempts.Add(1)
		return nil, errors.New("refused")
	}
	e, heard := observed(t, Config{DialTimeouts: []time.Duration{time.Second, time.Minute}, Hooks: Hooks{Dial: refuse}})
	apply(t, e, web(v1.ProtocolTCP, netip.MustParseAddrPort("192.0.2.1:80")))
	if conn, err := net.Dial("tcp", at(t, e, RoleInternal).String()); err == nil { // else it was reset already
		defer conn.Close()
	}
	if r := heard.next(t); r.Outcome != connection.Unreachable || attempts.Load() != 2 {
		t.Errorf("%d attempts, outcome %v, want 2 and unreachable", attempts.Load(), r.Outcome)
	}
	for _, bad := range [][]time.Duration{{}, {time.Second, 0}} {
		if err := (Config{DialTimeouts: bad}).Validate(); err == nil || !strings.Contains(err.Error(), "DialTimeouts") {
			t.Errorf("DialTimeouts %v: %v, want an error", bad, err)
		}
	}
}
