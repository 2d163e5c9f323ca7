package userspace

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// BenchmarkIdle reports the memory of this process that a client costs who says
// nothing: of the heap and of stacks, without what the kernel needs for its sockets.
//
// Budget: 12 KiB of a TCP connection, and 8 KiB of a UDP client.
func BenchmarkIdle(b *testing.B) {
	const clients = 1000
	for network, protocol := range map[string]v1.Protocol{"tcp": v1.ProtocolTCP, "udp": v1.ProtocolUDP} {
		b.Run(fmt.Sprintf("%s/clients=%d", network, clients), func(b *testing.B) {
			e, at := benchEngine(b, web(protocol, startServer(b, "listen", network)))
			goroutines, before := runtime.NumGoroutine(), liveMemory()
			startPart(b, "hold", network, at[0], clients)
			for deadline := time.Now().Add(patience); openClients(e) != clients; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					b.Fatalf("%d clients, want %d", openClients(e), clients)
				}
			}
			settle() // who counts as open may still be on the way to an endpoint
			// Once, whatever b.N is.
			b.ReportMetric(float64(liveMemory()-before)/clients, "bytes/client")
			b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/clients, "goroutines/client")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func openClients(e *Engine) (open int64) {
	for _, t := range e.Traffic() {
		open += t.Open
	}
	return open
}

// settle waits until no goroutine has come or gone for a while.
func settle() {
	const while = 300 * time.Millisecond
	n, since := runtime.NumGoroutine(), time.Now()
	for time.Since(since) < while {
		time.Sleep(time.Millisecond)
		if now := runtime.NumGoroutine(); now != n {
			n, since = now, time.Now()
		}
	}
}

// liveMemory is what the heap and stacks need. Pools are emptied by the second
// collection.
func liveMemory() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
