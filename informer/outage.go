package informer

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// outage lets the mirrors of one Run wait together for an API server that does not answer: they ask it
// in turn, one at a time, and the first answer wakes all. A reflector of client-go would ask for itself,
// with pauses of up to a minute that the end of its context does not end. An API server may refuse one kind of
// objects alone, such as one whose conversion fails: then the others get their turn.
type outage struct {
	turn chan struct{} // has room for one
	mu   sync.Mutex
	over chan struct{} // closed with the next answer
}

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 1500 * time.Millisecond // a change comes within 2s after the API server is back
	// refusedPause is the longest pause if the API server answers, but refuses what it is asked.
	refusedPause = 5 * time.Second
)

func newOutage() *outage {
	return &outage{turn: make(chan struct{}, 1), over: make(chan struct{})}
}

// until repeats a request until the API server answers it, or ctx ends.
func (o *outage) until(ctx context.Context, failed func(error), request func() error) error {
	began := time.Now()
	err := request()
	for pause := firstPause; concernsServer(err) && ctx.Err() == nil; {
		failed(err)
		rest := pause/2 + rand.N(pause/2) - time.Since(began)
		o.next(ctx, rest, func() { began, err = time.Now(), request() })
		pause = min(2*pause, longestPauseAfter(err))
	}
	if ctx.Err() != nil {
		return ctx.Err() // after a refused connection, client-go would pause first
	}
	o.wakeAll()
	return err
}

func longestPauseAfter(err error) time.Duration {
	if _, answers := errors.AsType[*apierrors.StatusError](err); answers {
		return refusedPause
	}
	return longestPause
}

// next repeats a request after another one was answered, or in its turn after a pause.
func (o *outage) next(ctx context.Context, rest time.Duration, request func()) {
	o.mu.Lock()
	over := o.over
	o.mu.Unlock()
	select {
	case <-ctx.Done():
		return
	case <-over:
	case o.turn <- struct{}{}: // a channel serves those that wait in their order
		defer func() { <-o.turn }()
		select {
		case <-ctx.Done():
			return
		case <-over:
		case <-time.After(rest):
		}
	}
	request()
}

// wakeAll wakes all that wait.
func (o *outage) wakeAll() {
	o.mu.Lock()
	defer o.mu.Unlock()
	close(o.over)
	o.over = make(chan struct{})
}

// source asks as from does, and waits where the API server does not answer.
func (o *outage) source(from cache.ListerWatcher, failed func(error)) cache.ListerWatcher {
	asked := cache.ToListerWatcherWithContext(from)
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (list runtime.Object, err error) {
			err = o.until(ctx, failed, func() (err error) { list, err = asked.ListWithContext(ctx, options); return err })
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (w watch.Interface, err error) {
			err = o.until(ctx, failed, func() (err error) { w, err = asked.WatchWithContext(ctx, options); return err })
			if err != nil && w != nil { // it began as ctx ended
				w.Stop()
				w = nil
			}
			return w, err
		},
	}, from)
}
