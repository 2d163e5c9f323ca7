package healthcheck

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/pause"
)

const (
	// stableAfter is how long a listener must have worked for the backoff to start again.
	stableAfter = 30 * time.Second
	// headerTimeout and clientTimeout bound every phase of a request, so that slow clients
	// cannot block the server.
	headerTimeout = 5 * time.Second
	clientTimeout = 10 * time.Second
	// maxHeader is more than any health check sends.
	maxHeader = 16 << 10
	// drainTimeout is how long running requests may take when the server stops.
	drainTimeout = 500 * time.Millisecond
)

// Server is an HTTP server that retries until it can listen: an address that is in use,
// for example by the previous process, is retried every 5s. A request may take 10s, and a
// connection is closed when it was idle for 10s. There are 256 connections at most: another one
// closes the one that has been idle for longest. The fields must not be changed after Run was called.
type Server struct {
	// Name identifies the server in logs.
	Name string
	// Address is host:port to listen on, with TCP.
	Address string
	// Handler answers requests. It must return when the context of its request ends.
	Handler http.Handler
	// Logger receives one line when a failure begins and one when it ends; nil means no
	// logging.
	Logger *zap.Logger
	// Listen opens the listener, for example in another network namespace; nil means net.ListenConfig.Listen.
	Listen func(ctx context.Context, network, address string) (net.Listener, error)

	network  string       // "" means tcp
	retry    backoff      // the zero value always pauses for bindRetry
	released func()       // if set, called when Run's ctx has ended and the address is free
	clients  *connections // nil means its own
	failure  failureState // of the listener
}

// Run serves until ctx ends, and returns nil after all of its goroutines have ended.
// Running requests then get 500ms to finish. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	if s.released != nil {
		defer s.released() // serve calls it earlier, if there was a listener
	}
	defer s.failure.clear()
	s.clients = cmp.Or(s.clients, newConnections(maxConnections))
	log := cmp.Or(s.Logger, zap.NewNop()).With(zap.String("server", s.Name), zap.String("address", s.Address))
	for ctx.Err() == nil {
		began := time.Now()
		err := s.serve(ctx, log)
		if ctx.Err() != nil {
			break
		}
		s.failed(log, err, serverDown)
		if time.Since(began) >= stableAfter {
			s.retry.reset()
		}
		pause.For(ctx, s.retry.next())
	}
	return nil
}

// Failure returns why the server currently does not answer; nil if it answers or does not
// run.
func (s *Server) Failure() error {
	_, err := s.failure.current(time.Now())
	return err
}

// serve listens and answers until ctx ends or the listener fails.
func (s *Server) serve(ctx context.Context, log *zap.Logger) error {
	listen := s.Listen
	if listen == nil {
		listen = new(net.ListenConfig).Listen
	}
	listener, err := listen(ctx, cmp.Or(s.network, "tcp"), s.Address)
	if err != nil {
		return fmt.Errorf("open listener: %w", err)
	}
	s.works(log)

	// Running requests outlive ctx for drainTimeout, but not the server.
	requests, abort := context.WithCancel(context.WithoutCancel(ctx))
	defer abort()
	var clients sync.WaitGroup
	web := s.web(log, &clients)
	web.BaseContext = func(net.Listener) context.Context { return requests }
	served := make(chan error, 1)
	go func() { served <- web.Serve(&watchedListener{Listener: listener, server: s, log: log}) }()
	select {
	case err = <-served:
		_ = web.Close()
	case <-ctx.Done():
		s.drain(ctx, web, listener)
		err = <-served
	}
	abort()
	clients.Wait()
	return fmt.Errorf("accept connections: %w", err)
}

// drain closes the listener first, so that the next listener on the address need not wait
// for clients.
func (s *Server) drain(ctx context.Context, web *http.Server, listener net.Listener) {
	_ = listener.Close()
	if s.released != nil {
		s.released()
	}
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer stop()
	if web.Shutdown(last) != nil {
		_ = web.Close()
	}
}

// web returns the HTTP server. clients counts the connections with a running goroutine.
func (s *Server) web(log *zap.Logger, clients *sync.WaitGroup) *http.Server {
	clientErrors, _ := zap.NewStdLogAt(log, zap.DebugLevel) // http.Server logs faults of clients only
	return &http.Server{
		Handler: panicLogger{s.Handler, log}, ReadHeaderTimeout: headerTimeout, ReadTimeout: clientTimeout,
		WriteTimeout: clientTimeout, IdleTimeout: clientTimeout, MaxHeaderBytes: maxHeader, ErrorLog: clientErrors,
		DisableGeneralOptionsHandler: true, // it would answer 200 to OPTIONS *
		ConnState: func(conn net.Conn, state http.ConnState) {
			s.clients.changed(conn, state)
			switch state {
			case http.StateNew:
				clients.Add(1)
			case http.StateClosed, http.StateHijacked:
				clients.Done()
			case http.StateActive, http.StateIdle:
			}
		},
	}
}

// failed records an error, and logs it unless it is the same as before.
func (s *Server) failed(log *zap.Logger, err error, kind failureKind) {
	if s.failure.set(err, kind, time.Now()) {
		log.Warn("server does not answer, will be retried", zap.Error(err))
	}
}

func (s *Server) works(log *zap.Logger) {
	if s.failure.clear() {
		log.Info("server answers again")
	}
}

// panicLogger logs panics of a handler as errors. http.Server would log them with the
// faults of clients.
type panicLogger struct {
	http.Handler
	log *zap.Logger
}

func (s panicLogger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if err, ok := p.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
			s.log.Error("HTTP handler panicked, its request fails", zap.Any("panic", p), zap.Stack("stack"))
		}
		panic(http.ErrAbortHandler)
	}()
	s.Handler.ServeHTTP(w, r)
}

// watchedListener reports errors of Accept to its server. http.Server retries some of them
// silently, for example a lack of file descriptors.
type watchedListener struct {
	net.Listener
	server *Server
	log    *zap.Logger
}

func (l *watchedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	switch {
	case err == nil:
		l.server.works(l.log)
	case !errors.Is(err, net.ErrClosed): // closed by drain, or reported by serve
		l.server.failed(l.log, fmt.Errorf("accept connections: %w", err), acceptFails)
	}
	return conn, err
}

// failureKind decides how long a failure lasts.
type failureKind int

const (
	// serverDown lasts until the server listens.
	serverDown failureKind = iota
	// acceptFails ends after acceptFailureTTL unless it is repeated. When the client has
	// left, nothing is accepted any more that could show that accepting works again.
	acceptFails
)

// acceptFailureTTL is longer than http.Server waits between attempts, which is at most 1s.
const acceptFailureTTL = 2 * time.Second

// failureState holds the current failure and since when it lasts. The zero value means
// none.
type failureState struct {
	mu    sync.Mutex // guards all below
	err   error
	kind  failureKind
	since time.Time
	last  time.Time
}

// set reports whether the failure differs from the previous one.
func (f *failureState) set(err error, kind failureKind, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	isNew := f.err == nil || f.err.Error() != err.Error()
	if f.err == nil || f.overLocked(now) {
		f.since = now
	}
	f.err, f.kind, f.last = err, kind, now
	return isNew
}

// clear reports whether there was a failure.
func (f *failureState) clear() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.err != nil
	f.err = nil
	return was
}

// current returns the current failure and since when it lasts, or nil.
func (f *failureState) current(now time.Time) (since time.Time, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil || f.overLocked(now) {
		return time.Time{}, nil
	}
	return f.since, f.err
}

func (f *failureState) overLocked(now time.Time) bool {
	return f.kind == acceptFails && now.Sub(f.last) > acceptFailureTTL
}

// bindRetry is how soon a Server retries an address that is in use, as with kube-proxy.
const bindRetry = 5 * time.Second

// backoff doubles the pause between attempts, from first up to longest.
type backoff struct {
	first, longest time.Duration // 0 means bindRetry, and first
	pause          time.Duration
}

func (b *backoff) reset() { b.pause = 0 }

func (b *backoff) next() time.Duration {
	first := cmp.Or(b.first, bindRetry)
	b.pause = min(max(2*b.pause, first), max(first, b.longest))
	return b.pause
}
