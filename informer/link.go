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

// LinkOptions are the options of NewLink.
type LinkOptions struct {
	// HeaderTimeout is how long the header of a response may take. The API server sends
	// it at once for a watch. For a list it takes up to a minute (kube-apiserver's
	// --request-timeout). 0 means 75s, Never no limit.
	HeaderTimeout time.Duration
	// Repeat is the interval at which a continuing failure is logged again. 0 means 2m.
	Repeat time.Duration
	// Logger receives log lines for operators; nil is silent.
	Logger *zap.Logger
}

const (
	defaultHeaderTimeout = 75 * time.Second
	defaultRepeat        = 2 * time.Minute
)

// Link monitors the requests of a client to its API server. It logs why the API server
// does not answer, and when it answers again: client-go does not log refused
// connections. It also ends requests without a response, and watches that last longer
// than they should, since HTTP/1.1 has no pings. Several goroutines may call its methods
// at once.
type Link struct {
	options LinkOptions

	mu       sync.Mutex // guards all below
	began    time.Time  // of the current failure; zero if there is none
	logged   time.Time  // when a failure was last logged
	cause    string     // of that failure
	open     bool       // the end of that failure is not logged yet
	failures uint64
}

// NewLink returns a Link. Attach it to a client's configuration, and pass it to Run as
// Options.Link.
func NewLink(o LinkOptions) *Link {
	o.HeaderTimeout = cmp.Or(o.HeaderTimeout, defaultHeaderTimeout)
	o.Repeat = cmp.Or(o.Repeat, defaultRepeat)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	o.Logger = o.Logger.Named("informer")
	return &Link{options: o}
}

// Attach makes the clients of a configuration use the Link. Unless the configuration has
// a Dial function, Attach also sets TCP keepalives, which detect a dead peer within half
// a minute.
func (l *Link) Attach(config *rest.Config) {
	config.Wrap(l.Wrap)
	if config.Dial == nil {
		dialer := &net.Dialer{
			Timeout:         5 * time.Second, // client-go's 30s would delay the first request after an outage
			KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
		}
		config.Dial = dialer.DialContext
	}
}

// Wrap sends all requests through the Link. Use it as rest.Config.WrapTransport.
func (l *Link) Wrap(next http.RoundTripper) http.RoundTripper {
	return transport(func(r *http.Request) (*http.Response, error) {
		response, err := l.send(next, r)
		switch {
		case err != nil && errors.Is(r.Context().Err(), context.Canceled): // by the client
		case err != nil:
			l.failed(r, rootOf(err), err)
		case refused(response.StatusCode):
			l.failed(r, strconv.Itoa(response.StatusCode), fmt.Errorf("%s %s: status %s", r.Method, r.URL.Path, response.Status))
		default:
			l.answered(r)
		}
		return response, err
	})
}

// transport implements http.RoundTripper.
type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// refused reports whether a status concerns the API server as a whole. Forbidden (403)
// concerns one kind of objects.
func refused(status int) bool {
	return status == http.StatusUnauthorized || status == http.StatusTooManyRequests || status >= http.StatusInternalServerError
}

// Reachable returns whether the API server answered the last request, and how many
// requests it did not answer, or refused. It is APIServer of metrics.Sources.
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
	if cause == l.cause && now.Sub(l.logged) < l.options.Repeat {
		return
	}
	l.cause, l.logged, l.open = cause, now, true
	l.options.Logger.Warn("API server does not answer: trying again, programmed Services stay",
		zap.String("address", r.URL.Host), zap.Duration("for", now.Sub(l.began)), zap.Error(err))
}

func (l *Link) answered(r *http.Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open {
		l.options.Logger.Info("API server answers again", zap.String("address", r.URL.Host), zap.Duration("after", time.Since(l.began)))
	}
	l.began, l.open = time.Time{}, false
}

// rootOf returns an error's innermost cause. The errors around it contain ports, which
// differ each time.
func rootOf(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}

// send sends a request, and ends it if its response does not begin or end in time.
func (l *Link) send(next http.RoundTripper, r *http.Request) (*http.Response, error) {
	limit := l.options.HeaderTimeout
	if limit == NoHeaderTimeout {
		return next.RoundTrip(r)
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	timer := time.AfterFunc(limit, func() {
		cancel(fmt.Errorf("no answer from %s within %v: %w", r.URL.Host, limit, context.DeadlineExceeded))
	})
	response, err := next.RoundTrip(r.WithContext(ctx))
	timer.Stop()
	if err != nil {
		if ctx.Err() != nil && r.Context().Err() == nil {
			err = context.Cause(ctx)
		}
		cancel(nil)
		return nil, err
	}
	if response.StatusCode == http.StatusSwitchingProtocols { // the caller owns the connection
		context.AfterFunc(r.Context(), func() { cancel(nil) })
		return response, nil
	}
	// The request of a watch contains its maximum duration.
	if seconds, err := strconv.Atoi(r.URL.Query().Get("timeoutSeconds")); err == nil && seconds > 0 {
		timer = time.AfterFunc(time.Duration(seconds)*time.Second+limit, func() { cancel(nil) })
	}
	response.Body = &body{response.Body, func() { timer.Stop(); cancel(nil) }}
	return response, nil
}

// body is a response body that calls release when it is closed.
type body struct {
	io.ReadCloser
	release func()
}

func (b *body) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}
