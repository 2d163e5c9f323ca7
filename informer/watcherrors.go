package informer

import (
	"context"
	"errors"
	"io"
	"net/url"
	"sync"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"
)

// Kinds of objects in log lines.
const (
	kindServices = "Services"
	kindSlices   = "EndpointSlices"
	kindCIDRs    = "ServiceCIDRs"
	kindNodes    = "Nodes"
	kindImports  = "ServiceImports"
)

// watchErrors logs the errors of one informer. client-go retries forever, so a repeated
// error is logged only once, until it has not occurred for repeatAfter.
type watchErrors struct {
	log    *zap.Logger
	kind   string
	linked bool // a Link logs the errors of the API server as a whole

	mu       sync.Mutex
	last     string    // guarded by mu
	lastTime time.Time // guarded by mu
}

// repeatAfter is longer than client-go's longest pause between attempts, a minute.
const repeatAfter = 5 * time.Minute

func newWatchErrors(o Options, kind string) *watchErrors {
	return &watchErrors{log: o.Logger, kind: kind, linked: o.Link != nil}
}

func (w *watchErrors) handle(_ context.Context, _ *cache.Reflector, err error) {
	if errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // normal: watches end, and resource versions expire
	}
	if w.linked && concernsServer(err) { // the Link logs it
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	repeated := err.Error() == w.last && time.Since(w.lastTime) < repeatAfter
	w.last, w.lastTime = err.Error(), time.Now()
	if !repeated {
		w.log.Warn("watch of the API server failed, will be retried", zap.String("objects", w.kind), zap.Error(err))
	}
}

// concernsServer reports whether an error comes from the transport or the API server as a
// whole, and not from one kind of objects.
func concernsServer(err error) bool {
	if status, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return refused(int(status.ErrStatus.Code))
	}
	_, ok := errors.AsType[*url.Error](err)
	return ok || errors.Is(err, context.DeadlineExceeded)
}
