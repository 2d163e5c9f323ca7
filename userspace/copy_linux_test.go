package userspace

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Small pieces go through buffers and large ones through splice(2). Both alternate on one
// connection, in both directions at once.
func TestPiecesOfAnySizeArriveInOrder(t *testing.T) {
	echo := server(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) })
	e := engine(t)
	apply(t, e, web(v1.ProtocolTCP, echo))
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(t.Context(), "tcp", at(t, e, RoleInternal).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	random := rand.NewChaCha8([32]byte{1})
	var sent []byte
	for _, size := range []int{1, copyBufferSize - 1, 3, copyBufferSize, 100, copyBufferSize + 1, 2, 5 << 20, 7, 10 * copyBufferSize, 1, 1} {
		piece := make([]byte, size)
		_, _ = random.Read(piece)
		sent = append(sent, piece...)
		go func() { _, _ = conn.Write(piece) }() // the answer shows whether it worked
		got := make([]byte, size)
		if n, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, piece) {
			t.Fatalf("piece of %d bytes: got %d bytes, %v, equal: %v; want all of them", size, n, err, bytes.Equal(got, piece))
		}
	}
	go func() { // all in one write
		_, _ = conn.Write(sent)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("got %d bytes, %v, equal: %v; want %d", len(got), err, bytes.Equal(got, sent), len(sent))
	}
}
