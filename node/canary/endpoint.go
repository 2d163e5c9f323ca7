package canary

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// numberLen is the length of a question and of its answer, in bytes.
	numberLen = 16
	// clientTimeout bounds how long a client may hold a connection, and maxClients how many may.
	clientTimeout = 2 * time.Second
	maxClients    = 16
	// acceptRetry is the pause after an error of Accept, for example for lack of descriptors.
	acceptRetry = time.Second
)

// number is a question, or its answer.
type number [numberLen]byte

// endpoint is the socket that the rules must lead to. It answers the questions that this
// process is asking, each once, and closes all other connections without an answer.
type endpoint struct {
	address  netip.AddrPort
	listener net.Listener
	done     chan struct{} // closed by close
	serving  sync.WaitGroup

	mu      sync.Mutex // guards all below
	answers map[number]number
}

// listen listens on a port that the kernel chooses.
func listen(ctx context.Context, n network, address netip.Addr) (*endpoint, error) {
	l, err := n.listen(ctx, netip.AddrPortFrom(address, 0))
	if err != nil {
		return nil, err
	}
	e := &endpoint{listener: l, done: make(chan struct{}), answers: map[number]number{}}
	if e.address, err = netip.ParseAddrPort(l.Addr().String()); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	e.serving.Go(e.accept)
	return e, nil
}

// close returns after all goroutines have ended.
func (e *endpoint) close() {
	close(e.done)
	_ = e.listener.Close()
	e.serving.Wait()
}

func (e *endpoint) accept() {
	slots := make(chan struct{}, maxClients)
	for {
		conn, err := e.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			select {
			case <-time.After(acceptRetry):
			case <-e.done:
				return
			}
			continue
		}
		select {
		case slots <- struct{}{}:
			e.serving.Go(func() {
				e.serve(conn)
				<-slots
			})
		default:
			_ = conn.Close()
		}
	}
}

// serve answers one question.
func (e *endpoint) serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(clientTimeout))
	stop := make(chan struct{})
	defer close(stop)
	e.serving.Go(func() { // a client must not delay close
		select {
		case <-e.done:
			_ = conn.Close()
		case <-stop:
		}
	})
	var question number
	if _, err := io.ReadFull(conn, question[:]); err != nil {
		return
	}
	if answer, ok := e.answerTo(question); ok {
		_, _ = conn.Write(answer[:]) // the client notices
	}
}

// ask draws a question and its answer.
func (e *endpoint) ask() (question, answer number) {
	_, _ = rand.Read(question[:]) // never fails
	_, _ = rand.Read(answer[:])
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answers[question] = answer
	return question, answer
}

// answerTo returns the answer, once.
func (e *endpoint) answerTo(question number) (answer number, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	answer, ok = e.answers[question]
	delete(e.answers, question)
	return answer, ok
}
