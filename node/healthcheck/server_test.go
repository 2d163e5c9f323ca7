package healthcheck

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/serviceplane/serviceplane/internal/poll"
)

const somewhere = "192.0.2.1:80"

func respond(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text) })
}

// serve runs s until the test ends or stop is called, which waits for it.
func serve(t *testing.T, s *Server) (stop func()) {
	t.Helper()
	return background(t, s.Run)
}

// background runs a function until the test ends or stop is called. The function must then
// return nil within 10s.
func background(t *testing.T, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := run(ctx); err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	}()
	stop = func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Error("Run did not return within 10s after the end of its context")
		}
	}
	t.Cleanup(stop)
	return stop
}

// lines returns the messages of a log with their errors.
func lines(logs *observer.ObservedLogs) []string {
	var all []string
	for _, entry := range logs.All() {
		all = append(all, strings.TrimSpace(fmt.Sprint(entry.Level, " ", entry.Message, " ", entry.ContextMap()["error"])))
	}
	return all
}

// HC-32 and W-38: listening is retried every 5s, logged once, and a Failure until it works.
func TestABusyAddressIsTriedUntilItIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		host := newFakeNet()
		host.set("tcp "+somewhere, syscall.EADDRINUSE)
		s := &Server{Name: "test", Address: somewhere, Handler: respond("hello"), Logger: zap.New(core), Listen: host.Listen}
		began := time.Now()
		serve(t, s)
		time.Sleep(12 * time.Second)
		if err := s.Failure(); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("Failure = %v, want %v", err, syscall.EADDRINUSE)
		}
		host.set("tcp "+somewhere, nil)
		time.Sleep(4 * time.Second)
		if code, body := host.ask(t, "tcp "+somewhere, somewhere); code != 200 || body != "hello" {
			t.Errorf("answer %d %q, want 200 hello", code, body)
		}
		if err := s.Failure(); err != nil {
			t.Errorf("Failure = %v when it answers, want nil", err)
		}
		var pauses []time.Duration
		for _, at := range host.tried() {
			pauses = append(pauses, at.Sub(began))
		}
		if want := []time.Duration{0, 5 * time.Second, 10 * time.Second, 15 * time.Second}; !slices.Equal(pauses, want) {
			t.Errorf("tried after %v, want %v", pauses, want)
		}
		want := []string{
			"warn server does not answer, will be retried open listener: listen tcp: bind: address already in use",
			"info server answers again <nil>",
		}
		if got := lines(logs); !slices.Equal(got, want) {
			t.Errorf("log:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

func TestAServerThatEndsWhileItWaitsHasNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := newFakeNet()
		host.set("tcp "+somewhere, syscall.EADDRINUSE)
		s := &Server{Address: somewhere, Handler: respond(""), Listen: host.Listen}
		began := time.Now()
		stop := serve(t, s)
		time.Sleep(time.Second)
		stop()
		if waited := time.Since(began); waited != time.Second {
			t.Errorf("Run returned after %v, want 1s", waited)
		}
		if err := s.Failure(); err != nil {
			t.Errorf("Failure = %v after the end, want nil", err)
		}
	})
}

// W-22: a listener that was closed by another goroutine is replaced.
func TestADeadListenerIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := newFakeNet()
		s := &Server{Address: somewhere, Handler: respond("hello"), Listen: host.Listen}
		serve(t, s)
		for range 3 {
			synctest.Wait()
			host.kill("tcp " + somewhere)
			synctest.Wait()
			if err := s.Failure(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("Failure = %v, want %v", err, net.ErrClosed)
			}
			time.Sleep(bindRetry)
			synctest.Wait()
			if code, body := host.ask(t, "tcp "+somewhere, somewhere); code != 200 {
				t.Errorf("answer %d %q after the death of the listener, want 200", code, body)
			}
		}
	})
}

// W-22: the server survives an error of accept that net/http does not retry.
func TestAnAcceptErrorThatIsNotTemporary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		host := newFakeNet()
		s := &Server{Address: somewhere, Handler: respond("hello"), Logger: zap.New(core), Listen: host.Listen}
		serve(t, s)
		synctest.Wait()
		host.failAccept(syscall.ENOBUFS)
		host.ask(t, "tcp "+somewhere, somewhere)
		if err := s.Failure(); !errors.Is(err, syscall.ENOBUFS) {
			t.Errorf("Failure = %v, want %v", err, syscall.ENOBUFS)
		}
		host.failAccept(nil)
		time.Sleep(bindRetry)
		synctest.Wait()
		if code, body := host.ask(t, "tcp "+somewhere, somewhere); code != 200 {
			t.Errorf("answer %d %q afterwards, want 200", code, body)
		}
		if got := lines(logs); len(got) != 2 {
			t.Errorf("log %q, want one line for the failure and one for its end (W-38)", got)
		}
	})
}

// W-22: a temporary lack of file descriptors ends nothing, and is logged once (W-38).
func TestAServerSurvivesALackOfDescriptors(t *testing.T) {
	for _, lack := range []error{syscall.EMFILE, syscall.ENFILE} {
		synctest.Test(t, func(t *testing.T) {
			core, logs := observer.New(zap.InfoLevel)
			host := newFakeNet()
			s := &Server{Address: somewhere, Handler: respond("hello"), Logger: zap.New(core), Listen: host.Listen}
			serve(t, s)
			synctest.Wait()
			host.failAccept(lack)
			time.AfterFunc(8*time.Second, func() {
				if err := s.Failure(); !errors.Is(err, lack) {
					t.Errorf("Failure = %v, want %v", err, lack)
				}
				host.failAccept(nil)
			})
			if code, body := host.ask(t, "tcp "+somewhere, somewhere); code != 200 {
				t.Errorf("answer %d %q, want 200 once there are descriptors again", code, body)
			}
			if err := s.Failure(); err != nil {
				t.Errorf("Failure = %v afterwards, want nil", err)
			}
			if got := len(host.tried()); got != 1 {
				t.Errorf("opened %d listeners, want 1", got)
			}
			if got := lines(logs); len(got) != 2 {
				t.Errorf("log %q, want one line for the failure and one for its end", got)
			}
		})
	}
}

// A failure of accept expires: after the client has left, nothing is accepted that could
// show that accepting works again.
func TestAnOldAcceptErrorIsNoFailure(t *testing.T) {
	var f failureState
	if !f.set(syscall.EMFILE, acceptFails, noon) || f.set(syscall.EMFILE, acceptFails, noon.Add(time.Second)) {
		t.Error("set: want a failure to be new once")
	}
	if since, err := f.current(noon.Add(3 * time.Second)); !errors.Is(err, syscall.EMFILE) || since != noon {
		t.Errorf("failure %v since %v, want EMFILE since noon", err, since)
	}
	if _, err := f.current(noon.Add(3*time.Second + 1)); err != nil {
		t.Errorf("failure %v 2s after it was seen last, want nil", err)
	}
	f.set(syscall.EMFILE, acceptFails, noon.Add(time.Hour))
	if since, _ := f.current(noon.Add(time.Hour)); since != noon.Add(time.Hour) {
		t.Errorf("failure since %v, want another one than before", since)
	}
	f.set(syscall.EADDRINUSE, serverDown, noon.Add(time.Hour))
	if _, err := f.current(noon.Add(24 * time.Hour)); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("failure %v, want one of the server to stay", err)
	}
}

// realServer serves on a free port of the loopback interface.
func realServer(t *testing.T, s *Server) (stop func()) {
	t.Helper()
	s.Address = fmt.Sprintf("127.0.0.1:%d", freePort(t))
	stop = serve(t, s)
	poll.Until(t, "the server listens", func() bool {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Address)
		if err != nil {
			return false
		}
		return conn.Close() == nil
	})
	return stop
}

// freePort is free in both families.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

func client(t *testing.T) *http.Client {
	t.Helper()
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 10 * time.Second}
}

func TestAServerOnRealSockets(t *testing.T) {
	busy, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Address: busy.Addr().String(), Handler: respond("hello"), retry: backoff{first: time.Millisecond}}
	stop := serve(t, s)
	poll.Until(t, "a failure while the address is in use", func() bool { return s.Failure() != nil })
	busy.Close()
	poll.Until(t, "no failure when the address is free", func() bool { return s.Failure() == nil })
	if code, body := ask(t, client(t), "http://"+s.Address); code != 200 || body != "hello" {
		t.Errorf("answer %d %q, want 200 hello", code, body)
	}
	stop()
	if code, _ := ask(t, client(t), "http://"+s.Address); code != 0 {
		t.Errorf("answer %d after the end, want none", code)
	}
}

// A slow client delays the end of Run for at most 500ms.
func TestSlowClientsDoNotHoldTheEnd(t *testing.T) {
	s := &Server{Handler: respond("hello")}
	stop := realServer(t, s)
	for _, words := range []string{"", "GET / HTTP/1.1\r\nHost: x\r\n", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"} {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, words); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	stop()
	if took := time.Since(began); took > headerTimeout-time.Second {
		t.Errorf("Run returned %v after the end of ctx, want about %v", took, drainTimeout)
	}
}

// A slow client is disconnected, so that connections do not accumulate.
func TestSlowClientsAreHungUpOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := newFakeNet()
		serve(t, &Server{Address: somewhere, Handler: respond("hello"), Listen: host.Listen})
		synctest.Wait()
		conn, err := host.dial("tcp "+somewhere, somewhere)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\n"); err != nil {
			t.Fatal(err)
		}
		_, _ = io.ReadAll(conn) // ends when the server disconnects
		if took := time.Since(began); took > headerTimeout {
			t.Errorf("disconnected after %v, want %v", took, headerTimeout)
		}
	})
}

// A request that is running at the end is finished if it is quick.
func TestTheLastRequestIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := newFakeNet()
		asked := make(chan struct{})
		s := &Server{Address: somewhere, Listen: host.Listen, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			close(asked)
			time.Sleep(drainTimeout / 2)
			fmt.Fprint(w, "goodbye")
		})}
		stop := serve(t, s)
		synctest.Wait()
		answered := make(chan string)
		go func() {
			_, body := host.ask(t, "tcp "+somewhere, somewhere)
			answered <- body
		}()
		<-asked
		go stop()
		if got := <-answered; got != "goodbye" {
			t.Errorf("answer %q, want goodbye", got)
		}
	})
}

// Run waits for handlers. Their context ends 500ms after that of Run.
func TestRunWaitsForItsHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := newFakeNet()
		ended := false
		asked := make(chan struct{})
		s := &Server{Address: somewhere, Listen: host.Listen, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			close(asked)
			<-r.Context().Done()
			time.Sleep(time.Second)
			ended = true
		})}
		stop := serve(t, s)
		synctest.Wait()
		conn, err := host.dial("tcp "+somewhere, somewhere)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		<-asked
		began := time.Now()
		stop()
		if took := time.Since(began); !ended || took != drainTimeout+time.Second {
			t.Errorf("Run returned after %v, handler ended: %v, want %v and true", took, ended, drainTimeout+time.Second)
		}
	})
}

func TestAPanicOfTheHandlerIsLogged(t *testing.T) {
	core, logs := observer.New(zap.InfoLevel)
	s := &Server{Logger: zap.New(core), Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") })}
	realServer(t, s)
	if code, _ := ask(t, client(t), "http://"+s.Address); code != 0 {
		t.Errorf("answer %d, want none", code)
	}
	if got := logs.FilterMessage("HTTP handler panicked, its request fails").FilterLevelExact(zap.ErrorLevel).Len(); got != 1 {
		t.Errorf("log %v, want one line about the panic", lines(logs))
	}
}

// HC-07: OPTIONS * reaches the handler too; net/http would answer 200.
func TestEveryRequestComesToTheHandler(t *testing.T) {
	s := &Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })}
	realServer(t, s)
	for _, request := range []string{"OPTIONS *", "HEAD /", "DELETE /a/../b", "PUT //x?y", "BREW /pot"} {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", s.Address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", request)
		if got, err := bufio.NewReader(conn).ReadString('\n'); !strings.Contains(got, " 418 ") {
			t.Errorf("%s: answer %q, error %v, want 418", request, got, err)
		}
	}
}

func TestBackoffDoubles(t *testing.T) {
	b := backoff{first: time.Second, longest: 30 * time.Second}
	var got []time.Duration
	for range 7 {
		got = append(got, b.next()/time.Second)
	}
	b.reset()
	got = append(got, b.next()/time.Second)
	if want := []time.Duration{1, 2, 4, 8, 16, 30, 30, 1}; !slices.Equal(got, want) {
		t.Errorf("pauses %v, want %v", got, want)
	}
	var constant backoff
	if first, second := constant.next(), constant.next(); first != bindRetry || second != bindRetry {
		t.Errorf("pauses %v and %v, want %v", first, second, bindRetry)
	}
}
