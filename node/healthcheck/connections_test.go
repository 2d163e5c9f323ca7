package healthcheck

import (
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/types"
)

// TestConnectionsAreBounded: clients that connect and send nothing, part of a request, or one request
// and no more, take no more descriptors than the bound, and other clients are answered meanwhile.
func TestConnectionsAreBounded(t *testing.T) {
	texts := map[string]string{"nothing": "", "part of a request": "GET / HTTP/1.1\r\nHost:", "one request": "GET / HTTP/1.1\r\nHost: a\r\n\r\n"}
	for how, text := range texts {
		t.Run("a server/"+how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host := newFakeNet()
				serve(t, &Server{Name: "test", Address: somewhere, Handler: respond("ok"), Listen: host.Listen})
				synctest.Wait()
				holdMany(t, host, []string{"tcp " + somewhere}, text, maxConnections)
			})
		})
		t.Run("health check node ports/"+how, func(t *testing.T) {
			inBubble(t, func(t *testing.T, b *bubble) {
				var keys []string
				all := services{}
				for i := range 8 {
					all[types.NamespacedName{Namespace: "ns", Name: fmt.Sprint(i)}] = struct {
						Port           uint16
						LocalEndpoints int
					}{uint16(30000 + i), 1}
					keys = append(keys, fmt.Sprint("tcp4 0.0.0.0:", 30000+i))
				}
				b.Update("IPv4", full("IPv4", all))
				b.expectOpen(t, "node ports", keys...)
				holdMany(t, b.fakeNet, keys, text, maxNodePortConnections)
			})
		})
	}
}

// holdMany opens more connections than a bound, which send a text and are kept open.
func holdMany(t *testing.T, host *fakeNet, keys []string, text string, bound int) {
	t.Helper()
	var open atomic.Int64
	for i := range bound + 200 {
		conn, err := host.dial(keys[i%len(keys)], somewhere)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		open.Add(1)
		go func() {
			defer open.Add(-1)
			_, _ = io.Copy(io.Discard, conn)
		}()
		go func() { _, _ = io.WriteString(conn, text) }()
		synctest.Wait() // no time passes, so that no timeout closes a connection
		if i%100 == 0 {
			if code, body := host.ask(t, keys[i%len(keys)], somewhere); code != 200 {
				t.Errorf("with %d connections, another client gets %d %s, want 200", i+1, code, body)
			}
			synctest.Wait()
		}
	}
	if n := open.Load(); n > int64(bound) || n < int64(bound)-1 { // one gave way to the last other client
		t.Errorf("%d connections are open, want %d", n, bound)
	}
}
