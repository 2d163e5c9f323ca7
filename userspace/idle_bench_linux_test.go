package userspace

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/poll"
)

// BenchmarkIdle reports this process's memory for an idle client: heap and stacks,
// without the kernel's memory for sockets.
//
// Budget: 12 KiB for a TCP connection, and 8 KiB for a UDP client.
func BenchmarkIdle(b *testing.B) {
	const clients = 1000
	for network, protocol := range map[string]v1.Protocol{"tcp": v1.ProtocolTCP, "udp": v1.ProtocolUDP} {
		b.Run(fmt.Sprintf("%s/clients=%d", network, clients), func(b *testing.B) {
			e, at := benchEngine(b, web(protocol, startServer(b, "listen", network)))
			goroutines, before := runtime.NumGoroutine(), liveMemory()
			startPart(b, "hold", network, at[0], clients)
			poll.Until(b, fmt.Sprint(clients, " clients"), func() bool { return openClients(e) == clients })
			awaitIdle() // open clients may still be connecting to an endpoint
			// Measured once, whatever b.N is.
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

// awaitIdle waits until the number of goroutines is constant for a while.
func awaitIdle() {
	const while = 300 * time.Millisecond
	n, since := runtime.NumGoroutine(), time.Now()
	for time.Since(since) < while {
		time.Sleep(time.Millisecond)
		if now := runtime.NumGoroutine(); now != n {
			n, since = now, time.Now()
		}
	}
}

// liveMemory returns the memory of heap and stacks. Pools are empty after the second
// collection.
func liveMemory() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
