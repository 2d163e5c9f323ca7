package informer

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// TestOneAsksDuringAnOutage: all go on within two seconds after the API server is back, or five if it
// refused, and meanwhile it hears from one of them at a time.
func TestOneAsksDuringAnOutage(t *testing.T) {
	for name, c := range map[string]struct {
		err     error
		atMost  int64 // requests
		patient time.Duration
	}{
		"no answer": {&url.Error{Op: "Get", URL: "https://192.0.2.1", Err: errors.New("connection refused")}, 1000, 2 * time.Second},
		"refused": {
			apierrors.NewGenericServerResponse(http.StatusServiceUnavailable, "get", schema.GroupResource{}, "", "", 0, true), 300, 5 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const mirrors, outageTime = 5, 10 * time.Minute
				var (
					o        = newOutage()
					all      sync.WaitGroup
					requests atomic.Int64
				)
				back := time.Now().Add(outageTime)
				for range mirrors {
					all.Go(func() {
						err := o.until(t.Context(), func(error) {}, func() error {
							if time.Now().Before(back) {
								requests.Add(1)
								return c.err
							}
							return nil
						})
						if late := time.Since(back); err != nil || late > c.patient {
							t.Errorf("until = %v, %v after the API server is back, want nil within %v", err, late, c.patient)
						}
					})
				}
				all.Wait()
				if n := requests.Load(); n > c.atMost {
					t.Errorf("%d requests during the outage, want at most %d", n, c.atMost)
				}
			})
		})
	}
}

// After an outage, a kind that is refused for ever, as when its conversion fails, keeps no other kind waiting.
func TestAKindThatIsRefusedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := &url.Error{Op: "Get", URL: "https://192.0.2.1", Err: errors.New("connection refused")}
		refused := apierrors.NewInternalError(errors.New("conversion webhook failed"))
		ctx, stop := context.WithCancel(t.Context())
		back := time.Now().Add(10 * time.Minute)
		o := newOutage()
		var broken, others sync.WaitGroup
		for range 2 {
			broken.Go(func() {
				_ = o.until(ctx, func(error) {}, func() error {
					if time.Now().Before(back) {
						return gone
					}
					return refused
				})
			})
		}
		synctest.Wait() // they ask first
		for range 3 {
			others.Go(func() {
				err := o.until(ctx, func(error) {}, func() error {
					if time.Now().Before(back) {
						return gone
					}
					return nil
				})
				if late := time.Since(back); err != nil || late > 3*longestPause {
					t.Errorf("until = %v, %v after the API server is back, want nil within %v", err, late, 3*longestPause)
				}
			})
		}
		others.Wait()
		stop()
		broken.Wait()
	})
}

// TestAnOutageEndsWithItsContext: at once, whoever asks and whoever waits.
func TestAnOutageEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), time.Hour+time.Millisecond)
		defer stop()
		gone := &url.Error{Op: "Get", URL: "https://192.0.2.1", Err: errors.New("connection refused")}
		began := time.Now()
		var (
			o   = newOutage()
			all sync.WaitGroup
		)
		for range 4 {
			all.Go(func() {
				if err := o.until(ctx, func(error) {}, func() error { return gone }); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("until = %v, want %v", err, context.DeadlineExceeded)
				}
			})
		}
		all.Wait()
		if took := time.Since(began); took != time.Hour+time.Millisecond {
			t.Errorf("it ends after %v, want with its context", took)
		}
	})
}

// A watch that begins as its context ends is stopped, so that its goroutine ends.
func TestAWatchThatBeginsAsItsContextEnds(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	begun := watch.NewFake()
	from := newOutage().source(&cache.ListWatch{WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
		end()
		return begun, nil
	}}, func(error) {})
	w, err := cache.ToListerWatcherWithContext(from).WatchWithContext(ctx, metav1.ListOptions{})
	if w != nil || !errors.Is(err, context.Canceled) || !begun.IsStopped() {
		t.Errorf("watch %v, %v, stopped: %v; want no watch, %v, and that it is stopped", w, err, begun.IsStopped(), context.Canceled)
	}
}

// TestOneKindIsNoOutage: an answer about one kind of objects is no outage.
func TestOneKindIsNoOutage(t *testing.T) {
	o := newOutage()
	absent := apierrors.NewNotFound(schema.GroupResource{}, "servicecidrs")
	if err := o.until(t.Context(), func(error) { t.Error("the outage of an API server that answers") }, func() error { return absent }); !errors.Is(err, absent) {
		t.Errorf("until = %v, want %v", err, absent)
	}
}

// Run ends during an outage with its context, whether the API server refuses connections or nobody hears of them.
func TestRunEndsDuringAnOutage(t *testing.T) {
	for name, dial := range map[string]func(context.Context, string, string) (net.Conn, error){
		"refused": func(context.Context, string, string) (net.Conn, error) { return nil, syscall.ECONNREFUSED },
		"silent": func(context.Context, string, string) (net.Conn, error) {
			time.Sleep(5 * time.Second)
			return nil, syscall.ETIMEDOUT
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const lifetime = 2*time.Hour + 17*time.Millisecond
				ctx, stop := context.WithTimeout(t.Context(), lifetime)
				defer stop()
				began := time.Now()
				config := &rest.Config{Host: "https://192.0.2.1:6443", Dial: dial}
				if err := Run(ctx, config, &recorder{}, Options{NodeName: "node-1"}); err != nil || time.Since(began) != lifetime {
					t.Errorf("Run = %v after %v, want nil after %v", err, time.Since(began), lifetime)
				}
				time.Sleep(time.Minute) // http.Transport ends its dials alone
			})
		})
	}
}
