package proxier

import (
	"errors"
	"time"

	"go.uber.org/zap"
)

// drainPause is the shortest time between two drains of a lock's queue: one costs a third of a small change.
const drainPause = time.Second

// holdNames takes the lock of the family's Names, or keeps it. For a cleanup it
// ignores locks of other Providers of this process, and only returns the error.
//
// Any local user can bind the address of the lock. A user who may not program the kernel
// must not keep the node from having Services, so such a lock is logged and ignored.
func (f *family) holdNames(cleanup bool) error {
	if !f.can.OwnsNames {
		return nil
	}
	if now := time.Now(); now.Sub(f.drained) >= drainPause {
		f.drained = now
		f.lock.drainQueue()
	}
	err := f.lock.acquire(f.config, f.name, cleanup)
	if foreign := (foreignLockError{}); errors.As(err, &foreign) {
		if f.foreignLock != err.Error() {
			f.log.Warn("lock of the names is not available, syncing without it", zap.Error(err))
		}
		f.foreignLock, err = err.Error(), nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case cleanup:
	case !errors.Is(err, ErrInUse):
		f.inUse = Condition{}
	case f.inUse.Message != err.Error():
		f.inUse = Condition{Type: ConditionInUse, Family: f.name, Since: time.Now(), Message: err.Error()}
		f.log.Warn("names are in use, nothing is programmed until the other instance has ended", zap.Error(err))
	}
	return err
}

// holdAllNames takes the locks of all families in their order, and stops at the first
// one that is taken. So if several instances wait, one of them gets all locks.
func holdAllNames(families []*family, cleanup bool) error {
	for _, f := range families {
		if err := f.holdNames(cleanup); err != nil {
			return err
		}
	}
	return nil
}

// releaseNames releases the locks of all families.
func releaseNames(families []*family) {
	for _, f := range families {
		f.lock.release()
	}
}
