package informer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// linked returns a Link, its log, and a client configuration that uses it.
func linked(url string, o LinkOptions) (*Link, *observer.ObservedLogs, *rest.Config) {
	core, logs := observer.New(zap.InfoLevel)
	o.Logger = zap.New(core)
	link := NewLink(o)
	config := &rest.Config{Host: url}
	link.Attach(config)
	return link, logs, config
}

func client(t *testing.T, config *rest.Config) kubernetes.Interface {
	t.Helper()
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The server starts after the client, stops and starts again. client-go does not log that.
func TestARefusedConnectionIsSaid(t *testing.T) {
	t.Parallel()
	server := apitest.New(t, apitest.Options{WatchList: true})
	server.Stop()
	link, logs, config := linked(server.URL(), LinkOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := Run(ctx, config, &recorder{}, Options{WaitTimeout: time.Millisecond, Link: link}); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	defer running.Wait()
	defer cancel()
	// There is a line for each cause.
	becomes := func(reachable bool, message string) func() bool {
		return func() bool {
			now, failures := link.Reachable()
			return now == reachable && failures > 0 && logs.FilterMessageSnippet(message).Len() > 0
		}
	}
	// The second time, connections may be in flight: the kernel and net/http have many words for their end.
	for _, cause := range []string{"connect: connection refused", ""} {
		poll.Until(t, "unreachable, and a line about the failure", becomes(false, "does not answer"))
		line := fmt.Sprint(logs.FilterMessageSnippet("does not answer").All()[0].ContextMap())
		if !strings.Contains(line, strings.TrimPrefix(server.URL(), "http://")) || !strings.Contains(line, "error:") || !strings.Contains(line, cause) {
			t.Errorf("log %s, want the address and the cause", line)
		}
		server.Start(t)
		poll.Until(t, "reachable, and a line about the recovery", becomes(true, "answers again"))
		logs.TakeAll()
		link.mu.Lock()
		link.logged = time.Time{} // so that the next failure is logged
		link.mu.Unlock()
		server.Stop()
	}
}

func TestEveryCauseIsSaid(t *testing.T) {
	status := func(code int) *httptest.Server {
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) }))
	}
	secure := httptest.NewUnstartedServer(http.NotFoundHandler())
	secure.Config.ErrorLog = nil
	secure.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	secure.StartTLS()
	secure.Config.ErrorLog, _ = zap.NewStdLogAt(zap.NewNop(), zap.ErrorLevel)
	hangUp := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	for name, c := range map[string]struct {
		server *httptest.Server
		url    string
		want   string // empty means no line
	}{
		"unknown name": {nil, "http://no-such-host.invalid:1", "no-such-host.invalid"},
		"certificate":  {secure, secure.URL, "x509: "},
		"cut":          {hangUp, hangUp.URL, "EOF"},
		"401":          {status(401), "", "401 Unauthorized"},
		"429":          {status(429), "", "429 Too Many"},
		"500":          {status(500), "", "500 Internal"},
		"503":          {status(503), "", "503 Service Unavailable"},
		"404":          {status(404), "", ""},
		"403":          {status(403), "", ""},
		"410":          {status(410), "", ""},
		"200":          {status(200), "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			url := c.url
			if c.server != nil {
				t.Cleanup(c.server.Close)
				url = c.server.URL
			}
			_, logs, config := linked(url, LinkOptions{})
			ask := func() {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				_, _ = client(t, config).CoreV1().RESTClient().Get().AbsPath("/api/v1/services").MaxRetries(0).DoRaw(ctx)
			}
			ask()
			ask()
			if c.want == "" {
				if logs.Len() != 0 {
					t.Errorf("log %v, want nothing", logs.All())
				}
				return
			}
			if logs.Len() != 1 {
				t.Fatalf("%d lines, want one for both: %v", logs.Len(), logs.All())
			}
			if line := fmt.Sprint(logs.All()[0].ContextMap()); !strings.Contains(line, c.want) || !strings.Contains(line, strings.SplitN(url, "//", 2)[1]) {
				t.Errorf("log %s, want the address and %q", line, c.want)
			}
		})
	}
}

// A failure is logged when it begins, when its cause changes, and after each Repeat. Its
// end is logged if its beginning was.
func TestAFaultIsSaidNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		link, logs, _ := linked("", LinkOptions{Repeat: time.Minute})
		var now error
		rt := link.Wrap(transport(func(*http.Request) (*http.Response, error) {
			if now != nil {
				return nil, now
			}
			return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody}, nil
		}))
		refusal, reset := errors.New("refused"), errors.New("reset")
		for i, step := range []struct {
			err   error
			lines int
		}{
			{nil, 0},
			{refusal, 1},
			{fmt.Errorf("port 1: %w", refusal), 0},
			{fmt.Errorf("port 2: %w", refusal), 0},
			{reset, 1},
			{nil, 1},
			{reset, 0},
			{nil, 0}, // flaps
			{refusal, 1},
			{refusal, 0},
			{refusal, 0},
			{refusal, 0},
			{refusal, 1},
			{nil, 1},
			{nil, 0},
		} {
			now = step.err
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://192.0.2.1/", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			if answer, err := rt.RoundTrip(r); err == nil {
				_ = answer.Body.Close()
			}
			if got := len(logs.TakeAll()); got != step.lines {
				t.Errorf("step %d, %v: %d lines, want %d", i, step.err, got, step.lines)
			}
			time.Sleep(15 * time.Second)
		}
	})
}

// The server accepts connections and does not answer, over HTTP/1.1. Requests time out,
// and Run works when the server answers again.
func TestAServerThatAcceptsAndNeverAnswers(t *testing.T) {
	t.Parallel()
	api := apitest.New(t, apitest.Options{})
	api.Put(t, service("a", "10.96.0.1"))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var silent atomic.Bool
	silent.Store(true)
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if silent.Load() {
			<-r.Context().Done()
			return
		}
		api.ServeHTTP(w, r)
	})}
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(l) })
	defer running.Wait()
	defer func() { _ = server.Close() }()

	link, logs, config := linked("http://"+l.Addr().String(), LinkOptions{HeaderTimeout: 200 * time.Millisecond})
	ctx, cancel := context.WithCancel(t.Context())
	r := &recorder{}
	running.Go(func() { _ = Run(ctx, config, r, Options{WaitTimeout: time.Millisecond, Link: link}) })
	defer cancel()
	poll.Until(t, "a line about the silence", func() bool {
		return logs.FilterMessageSnippet("does not answer").Len() == 1 && strings.Contains(fmt.Sprint(logs.All()[0].ContextMap()), "within 200ms")
	})
	silent.Store(false)
	r.eventually(t, "slices synced")
}

// A watch may last longer than HeaderTimeout, but not longer than its own timeout.
func TestAWatchEndsWhenItShould(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		link, _, _ := linked("", LinkOptions{HeaderTimeout: 10 * time.Second})
		rt := link.Wrap(transport(func(r *http.Request) (*http.Response, error) {
			from, to := io.Pipe()
			context.AfterFunc(r.Context(), func() { _ = to.CloseWithError(r.Context().Err()) })
			return &http.Response{StatusCode: http.StatusOK, Body: from}, nil
		}))
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://192.0.2.1/?watch=true&timeoutSeconds=300", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		answer, err := rt.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(answer.Body); err == nil || time.Since(began) != 310*time.Second {
			t.Errorf("the watch ended with %v after %v, want an error after 310s", err, time.Since(began))
		}
		_ = answer.Body.Close()
	})
}
