package nodeproxy

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// traffic is what clients do while the mode of a node changes: they keep connections open
// and exchange bytes over each again and again, and they open new ones all the time.
type traffic struct {
	t       *testing.T
	working sync.WaitGroup
	stop    chan struct{}

	// made and refused count the new connections, exchanged the exchanges over open ones.
	made, refused, exchanged atomic.Int64

	mu   sync.Mutex
	held []*heldConn
	cut  int
	errs []string // the first ones
}

// heldConn is a connection that stays open.
type heldConn struct {
	net.Conn

	name  string
	lines *bufio.Scanner
}

// exchangeTimeout is how long an exchange may take before the connection counts as cut, on
// a busy machine.
const exchangeTimeout = 20 * time.Second

// target is where a client connects to. source is its address, if not any: IPVS confuses
// two connections from one port to two frontends with the same endpoint.
type target struct {
	from             *netns.NS
	network, address string
	source           netip.Addr
}

// dial opens a connection that ends with a RST, so that the kernel forgets it soon.
func (to target) dial(t *testing.T) (*heldConn, error) {
	conn, err := to.from.DialFrom(t.Context(), to.network, to.source, to.address)
	if err != nil {
		return nil, err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		if err := tcp.SetLinger(0); err != nil {
			return nil, err
		}
	}
	return &heldConn{Conn: conn, name: to.network + " " + to.address, lines: bufio.NewScanner(conn)}, nil
}

// exchange sends a request and waits for the response. A lost datagram is sent again, as
// clients do.
func (h *heldConn) exchange() (err error) {
	if _, isUDP := h.Conn.(*net.UDPConn); !isUDP {
		return h.try(exchangeTimeout)
	}
	const attempts = 4
	for range attempts {
		if err = h.try(exchangeTimeout / attempts); err == nil {
			return nil
		}
		h.lines = bufio.NewScanner(h.Conn)
	}
	return err
}

func (h *heldConn) try(timeout time.Duration) error {
	if err := h.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := h.Write([]byte("?\n")); err != nil {
		return err
	}
	if !h.lines.Scan() {
		return fmt.Errorf("no response: %w", cmp.Or(h.lines.Err(), io.EOF))
	}
	return nil
}

// reach waits until a counter has a value, however slow it is: it must not stand still.
func (f *traffic) reach(t *testing.T, what string, counter *atomic.Int64, want func() int64) {
	t.Helper()
	for before := int64(-1); counter.Load() < want(); before = counter.Load() {
		if !poll.Soon(func() bool { return counter.Load() >= want() }) && counter.Load() == before {
			f.mu.Lock()
			defer f.mu.Unlock()
			t.Fatalf("no %s: %s", what, strings.Join(f.errs, "\n"))
		}
	}
}

// newTraffic opens connections to each target, and starts to exchange and to open more.
func newTraffic(t *testing.T, each int, targets []target) *traffic {
	t.Helper()
	f := &traffic{t: t, stop: make(chan struct{})}
	for _, to := range targets {
		for range each {
			conn, err := to.dial(t)
			if err == nil {
				f.held = append(f.held, conn)
				err = conn.exchange()
			}
			if err != nil {
				t.Fatalf("open %s %s: %v", to.network, to.address, err)
			}
		}
	}
	f.working.Go(func() { f.until(f.exchangeAll) })
	for _, half := range [][]target{targets[:len(targets)/2], targets[len(targets)/2:]} {
		f.working.Go(func() { f.until(func() { f.open(half) }) })
	}
	t.Cleanup(f.end)
	return f
}

// until repeats a step until the end.
func (f *traffic) until(step func()) {
	for {
		select {
		case <-f.stop:
			return
		default:
			step()
		}
	}
}

// exchangeAll exchanges bytes over all open connections. It drops those that are cut.
func (f *traffic) exchangeAll() {
	var whole []*heldConn
	for _, conn := range f.held {
		if err := conn.exchange(); err != nil {
			_ = conn.Close()
			f.mu.Lock()
			f.cut++
			f.mu.Unlock()
			f.note("cut", conn.name, err)
			continue
		}
		f.exchanged.Add(1)
		whole = append(whole, conn)
	}
	f.held = whole
}

// open opens one connection to each target, and closes it after an exchange.
func (f *traffic) open(targets []target) {
	for _, to := range targets {
		conn, err := to.dial(f.t)
		if err == nil {
			err = conn.exchange()
			_ = conn.Close()
		}
		if err != nil {
			f.refused.Add(1)
			f.note("refused", to.network+" "+to.address, err)
			time.Sleep(time.Millisecond) // a refusal must not starve the proxy
			continue
		}
		f.made.Add(1)
	}
}

func (f *traffic) note(what, name string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.errs) < 10 {
		f.errs = append(f.errs, fmt.Sprintf("%s %s %s: %v", time.Now().Format("15:04:05.000"), what, name, err))
	}
}

// end stops, and exchanges bytes over all open connections a last time.
func (f *traffic) end() {
	select {
	case <-f.stop:
		return
	default:
	}
	close(f.stop)
	f.working.Wait()
	f.exchangeAll()
	for _, conn := range f.held {
		_ = conn.Close()
	}
}
