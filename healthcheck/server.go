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
)

const (
	// bindRetry is how soon a Server tries a busy address again, as kube-proxy does.
	bindRetry = 5 * time.Second
	// stableAfter is how long a listener must have lived for its end to be a new event.
	stableAfter = 30 * time.Second
	// headerTimeout and clientTimeout bound every phase of a request, so that nobody
	// can tie up the server.
	headerTimeout = 5 * time.Second
	clientTimeout = 10 * time.Second
	// maxHeader is more than any prober sends.
	maxHeader = 16 << 10
	// lastAnswers is how long requests may take once the server ends.
	lastAnswers = 500 * time.Millisecond
)

// ListenFunc is net.ListenConfig.Listen, or does the same elsewhere, for example in
// another network namespace.
type ListenFunc func(ctx context.Context, network, address string) (net.Listener, error)

// Server is an HTTP server that insists on its address: one that is busy, maybe
// because the predecessor has not ended yet, is tried again every 5s until it is free.
// A request may take 10s, and a connection is closed when nobody uses it for 10s. The
// fields may not be changed after Run has been called.
type Server struct {
	// Name tells servers apart in logs.
	Name string
	// Address is host:port to listen on, with TCP.
	Address string
	// Handler answers. It must end when the context of its request does.
	Handler http.Handler
	// Logger hears once about each kind of failure, and about its end; nil is silent.
	Logger *zap.Logger
	// Listen opens the listener; nil means net.ListenConfig.Listen.
	Listen ListenFunc

	network  string       // "" means tcp
	retry    backoff      // the zero value means bindRetry, always
	released func()       // if set, is called when Run's ctx has ended and nothing listens
	failure  failureState // of the listener
}

// Run serves until ctx ends, and returns nil after every goroutine of it has ended.
// Requests that are under way then may take 500ms more. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	if s.released != nil {
		defer s.released() // serve calls it earlier, if there was a listener
	}
	defer s.failure.clear()
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
		pause(ctx, s.retry.next())
	}
	return nil
}

// Failure is what keeps the server from answering at the moment; nil when it
// answers, and when it does not run.
func (s *Server) Failure() error {
	_, err := s.failure.current(time.Now())
	return err
}

// serve returns when ctx has ended, or why nobody is answered.
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

	// Requests outlive ctx for a while, but not the server.
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

// drain closes the listener first, so that whoever is next on the address need not
// wait for clients.
func (s *Server) drain(ctx context.Context, web *http.Server, listener net.Listener) {
	_ = listener.Close()
	if s.released != nil {
		s.released()
	}
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), lastAnswers)
	defer stop()
	if web.Shutdown(last) != nil {
		_ = web.Close()
	}
}

// web adds a client to clients for each connection until its goroutine ends.
func (s *Server) web(log *zap.Logger, clients *sync.WaitGroup) *http.Server {
	complaints, _ := zap.NewStdLogAt(log, zap.DebugLevel) // clients' faults; ours are told otherwise
	return &http.Server{
		Handler: survivor{s.Handler, log}, ReadHeaderTimeout: headerTimeout, ReadTimeout: clientTimeout,
		WriteTimeout: clientTimeout, IdleTimeout: clientTimeout, MaxHeaderBytes: maxHeader, ErrorLog: complaints,
		DisableGeneralOptionsHandler: true, // it would answer 200 to OPTIONS *
		ConnState: func(_ net.Conn, state http.ConnState) {
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

// failed logs an error once, however often it comes.
func (s *Server) failed(log *zap.Logger, err error, kind failureKind) {
	if s.failure.set(err, kind, time.Now()) {
		log.Warn("server does not answer, will be tried again and again", zap.Error(err))
	}
}

func (s *Server) works(log *zap.Logger) {
	if s.failure.clear() {
		log.Info("server answers again")
	}
}

// survivor logs what an http.Server would hide among the faults of clients.
type survivor struct {
	http.Handler
	log *zap.Logger
}

func (s survivor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if err, ok := p.(error); !ok || !errors.Is(err, http.ErrAbortHandler) {
			s.log.Error("panic while answering", zap.Any("panic", p), zap.Stack("stack"))
		}
		panic(http.ErrAbortHandler)
	}()
	s.Handler.ServeHTTP(w, r)
}

// watchedListener tells its server about errors that http.Server retries, such as
// that the process is out of file descriptors.
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
	case !errors.Is(err, net.ErrClosed): // closed by us, or serve tells
		l.server.failed(l.log, fmt.Errorf("accept connections: %w", err), acceptFails)
	}
	return conn, err
}

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
