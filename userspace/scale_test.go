package userspace

import (
	"context"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// descriptors counts the open descriptors of the process; 0 without /proc.
func descriptors() int {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(files)
}

// Thousands of idle connections stay open, and each works afterwards.
func TestIdleConnectionsAreHeld(t *testing.T) {
	connections := 10000
	if have := int(files(t, 50000)); have < 50000 { // each needs four: this process is client, proxy and endpoint
		connections = have/4 - 200
		t.Logf("only %d descriptors: %d connections", have, connections)
	}
	// Splicing would need two more descriptors for each.
	echo := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(struct{ io.Writer }{conn}, struct{ io.Reader }{conn}) })
	e := engine(t)
	apply(t, e, web(v1.ProtocolTCP, echo))
	to := at(t, e, RoleInternal).String()
	conns := make([]net.Conn, connections)
	parallel(connections, 32, func(i int) {
		conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", to)
		if err != nil {
			t.Errorf("connection %d: %v", i, err)
			return
		}
		conns[i] = conn
	})
	t.Cleanup(func() {
		for _, conn := range conns {
			if conn != nil {
				_ = conn.Close()
			}
		}
	})
	if t.Failed() {
		return
	}
	counts := &e.services[webName(v1.ProtocolTCP)].counts
	poll.Until(t, "all are open", func() bool { return counts.Open.Load() == int64(connections) })
	var failed atomic.Int64
	parallel(connections, 32, func(i int) {
		_ = conns[i].SetDeadline(time.Now().Add(patience))
		if _, err := io.WriteString(conns[i], "x"); err != nil {
			failed.Add(1)
			return
		}
		if _, err := io.ReadFull(conns[i], make([]byte, 1)); err != nil {
			failed.Add(1)
		}
	})
	if n := failed.Load(); n != 0 {
		t.Errorf("%d of %d connections no longer work", n, connections)
	}
}

// parallel calls f for each number below n, with atOnce goroutines.
func parallel(n, atOnce int, f func(i int)) {
	var next atomic.Int64
	var running sync.WaitGroup
	for range atOnce {
		running.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				f(i)
			}
		})
	}
	running.Wait()
}

// Connections leak no descriptor, no goroutine and no memory. With SERVICEPLANE_SOAK set,
// there are ten times as many.
func TestShortConnectionsLeaveNothing(t *testing.T) {
	total := 8000
	if os.Getenv("SERVICEPLANE_SOAK") != "" {
		total = 200000
	}
	hello := server(t, func(conn *net.TCPConn) { _, _ = io.WriteString(conn, "hello") })
	e := engine(t)
	apply(t, e, web(v1.ProtocolTCP, hello))
	to := at(t, e, RoleInternal).String()
	open := &e.services[webName(v1.ProtocolTCP)].counts
	quiet := func() {
		t.Helper()
		poll.Until(t, "all have ended", func() bool { return open.Open.Load() == 0 })
	}
	round := func(n int) (heap uint64) {
		parallel(n, 16, func(int) { short(t.Context(), t, to) })
		quiet()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	round(total / 20) // fills the pools
	goroutines, files, heap := runtime.NumGoroutine(), descriptors(), round(total/20)
	heap = max(heap, round(total))
	after := round(total / 20)
	poll.Until(t, "as many goroutines, but for idle workers, and descriptors as before", func() bool {
		return runtime.NumGoroutine() <= goroutines+maxIdleWorkers && descriptors() <= files
	})
	if growth := int64(after) - int64(heap); growth > 2<<20 {
		t.Errorf("the heap has grown by %d bytes after %d connections, want about none", growth, total)
	}
	if n := open.Refused.Load(); n != 0 {
		t.Errorf("%d connections were refused", n)
	}
}

func short(ctx context.Context, t *testing.T, to string) {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", to)
	if err != nil {
		t.Error(err)
		return
	}
	defer conn.Close()
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // avoids TIME_WAIT, which would exhaust the ports
	}
	if got, err := io.ReadAll(conn); string(got) != "hello" || err != nil {
		t.Errorf("answer %q, %v", got, err)
	}
}
