package proxier

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"
)

// A kernel reports a feature as missing while its module is still being loaded for another
// process or the other family: busybox's modprobe finds the module in /proc/modules, and
// does not wait until it is ready.
const (
	maxModuleWaits = 3
	modulePause    = 100 * time.Millisecond
)

// waitForModule pauses after an UnsupportedError, and reports whether to try again. It does
// so maxModuleWaits times per family at most.
func (f *family) waitForModule(ctx context.Context, err error) bool {
	if f.moduleWaits == 0 || !errors.As(err, new(*UnsupportedError)) {
		return false
	}
	f.moduleWaits--
	f.log.Debug("kernel feature is missing, its module may still be loading: trying again", zap.Error(err))
	select {
	case <-time.After(modulePause):
		return true
	case <-ctx.Done():
		return false
	}
}
