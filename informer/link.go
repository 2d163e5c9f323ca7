package informer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/client-go/rest"
)

// LinkOptions are for a Link.
type LinkOptions struct {
	// HeaderTimeout is how long the header of an answer may take. A watch sends its
	// own at once, and a list after its work, for which a kube-apiserver takes a
	// minute (--request-timeout). 0 means 75s, Never for ever.
	HeaderTimeout time.Duration
	// Repeat is how soon a fault that goes on is logged again. 0 means 2m.
	Repeat time.Duration
	// Logger gets what an operator should know; nil is silent.
	Logger *zap.Logger
}

const (
	defaultHeaderTimeout = 75 * time.Second
	defaultRepeat        = 2 * time.Minute
)

// Link watches the requests of a client to its API server. It logs when there is no
// answer, why, and when there is one again: client-go reports no connection that is
// refused. It also ends what would never end: a request whose answer does not begin,
// and a watch that does not stop when it should. HTTP/1.1 has no pings.
// Its methods may be called from several goroutines at once.
type Link struct {
	options LinkOptions

	mu       sync.Mutex
	began    time.Time // of the present fault, zero if there is none
	said     time.Time // when a fault was last logged
	cause    string    // of that fault
	open     bool      // the end of that fault is not logged yet
	failures uint64
}

// NewLink makes a Link. Attach it to a client's configuration, and give it to Run
// as Options.Link.
func NewLink(o LinkOptions) *Link {
	o.HeaderTimeout = cmp.Or(o.HeaderTimeout, defaultHeaderTimeout)
	o.Repeat = cmp.Or(o.Repeat, defaultRepeat)
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	o.Logger = o.Logger.Named("informer")
	return &Link{options: o}
}

// Attach makes the clients of a configuration use the Link. It also lets them notice
// a peer that has vanished within half a minute, unless there is a Dial already.
func (l *Link) Attach(config *rest.Config) {
	config.Wrap(l.Wrap)
	if config.Dial == nil {
		dialer := &net.Dialer{
			Timeout:         30 * time.Second, // client-go's own
			KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
		}
		config.Dial = dialer.DialContext
	}
}

// Wrap is a rest.Config's WrapTransport: all requests go through the Link.
func (l *Link) Wrap(next http.RoundTripper) http.RoundTripper {
	return transport(func(r *http.Request) (*http.Response, error) {
		answer, err := l.ask(next, r)
		switch {
		case err != nil && errors.Is(r.Context().Err(), context.Canceled): // nobody wants to know
		case err != nil:
			l.failed(r, rootOf(err), err)
		case refused(answer.StatusCode):
			l.failed(r, strconv.Itoa(answer.StatusCode), fmt.Errorf("it answers %s %s with %s", r.Method, r.URL.Path, answer.Status))
		default:
			l.answered(r)
		}
		return answer, err
	})
}

// transport is a function as an http.RoundTripper.
type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// refused says whether a status tells of the API server as a whole. One that
// forbids a request (403) says so about one kind of objects.
func refused(status int) bool {
	return status == http.StatusUnauthorized || status == http.StatusTooManyRequests || status >= http.StatusInternalServerError
}

// Reachable says whether the last request was answered, and how many requests so far
// were not, or were refused. It fits metrics.Metrics.WatchAPIServer.
func (l *Link) Reachable() (now bool, failures uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.began.IsZero(), l.failures
}

func (l *Link) failed(r *http.Request, cause string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failures++
	now := time.Now()
	if l.began.IsZero() {
		l.began = now
	}
	if cause == l.cause && now.Sub(l.said) < l.options.Repeat {
		return
	}
	l.cause, l.said, l.open = cause, now, true
	l.options.Logger.Warn("the API server is not reached, will be tried again; what is programmed stays",
		zap.String("address", r.URL.Host), zap.Duration("for", now.Sub(l.began)), zap.Error(err))
}

func (l *Link) answered(r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open {
		l.options.Logger.Info("the API server is reached again", zap.String("address", r.URL.Host), zap.Duration("after", time.Since(l.began)))
	}
	l.began, l.open = time.Time{}, false
}

// rootOf is an error's innermost cause: the errors around it name ports that differ
// each time.
func rootOf(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}

// ask sends a request, and gives up on an answer that does not begin or end.
func (l *Link) ask(next http.RoundTripper, r *http.Request) (*http.Response, error) {
	limit := l.options.HeaderTimeout
	if limit == Never {
		return next.RoundTrip(r)
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	timer := time.AfterFunc(limit, func() {
		cancel(fmt.Errorf("no answer from %s within %v: %w", r.URL.Host, limit, context.DeadlineExceeded))
	})
	answer, err := next.RoundTrip(r.WithContext(ctx))
	timer.Stop()
	if err != nil {
		if ctx.Err() != nil && r.Context().Err() == nil {
			err = context.Cause(ctx)
		}
		cancel(nil)
		return nil, err
	}
	if answer.StatusCode == http.StatusSwitchingProtocols { // the connection is the caller's
		context.AfterFunc(r.Context(), func() { cancel(nil) })
		return answer, nil
	}
	// A watch says how long it may last at most.
	if seconds, err := strconv.Atoi(r.URL.Query().Get("timeoutSeconds")); err == nil && seconds > 0 {
		timer = time.AfterFunc(time.Duration(seconds)*time.Second+limit, func() { cancel(nil) })
	}
	answer.Body = &body{answer.Body, func() { timer.Stop(); cancel(nil) }}
	return answer, nil
}

// body releases what an answer needs when it is closed.
type body struct {
	io.ReadCloser
	release func()
}

func (b *body) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}
