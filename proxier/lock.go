package proxier

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
)

// owner is an Engine that may write objects with the instance's Names: see Engine.
type owner interface{ OwnsNames() bool }

// ErrInUse says that somebody else programs objects with one of the Names (table, chain
// prefix or device, whatever the engines) in the same network namespace and IP family:
// another process, which the error names, or another Provider of this one. Syncs fail
// until that has ended, and are retried. Cleanup does nothing beside another process. What
// a program cleans up beside Providers of its own is its own affair: after a change of the
// mode, which ends Run of the old Provider first, the new one's first sync is the time for
// the old one's Cleanup.
var ErrInUse = errors.New("the names are in use")

// otherUserError is the error of a lock that a process has which may not program anything.
type otherUserError struct{ error }

// ownsNames says whether an engine needs the lock.
func ownsNames(engine Engine) bool {
	o, ok := As[owner](engine)
	return ok && o.OwnsNames()
}

// hold takes the lock of a family, or keeps it. Any local user can take its names,
// which must not keep the node from having Services: that is said and passed over. So are
// other Providers of this process, if beside is true.
func (f *family) hold(c *Config, beside bool) error {
	if !ownsNames(f.engine) {
		return nil
	}
	f.lock.tidy()
	err := f.lock.take(c, f.name, beside)
	if taken := (otherUserError{}); errors.As(err, &taken) {
		if f.lockTakenBy != err.Error() {
			f.log.Warn("going on without the lock that keeps others with the same names away", zap.Error(err))
		}
		f.lockTakenBy, err = err.Error(), nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.taken
	switch {
	case !errors.Is(err, ErrInUse):
		f.taken = Condition{}
	case before.Message != err.Error():
		f.taken = Condition{Type: ConditionInUse, Family: f.name, Since: time.Now(), Message: err.Error()}
		f.log.Warn("somebody else programs the same objects; nothing is written until that has ended", zap.Error(err))
	}
	return err
}

// holdAll takes the locks of all families in their order, and none behind one that it does
// not get: of several who wait, one gets all of them.
func (p *Proxier) holdAll(beside bool) error {
	for _, f := range p.families {
		if err := f.hold(&p.config, beside); err != nil {
			return err
		}
	}
	return nil
}

// release lets others have the locks.
func (p *Proxier) release() {
	for _, f := range p.families {
		f.lock.release()
	}
}

// owned are the names that no two instances may share, and what has them. Engines differ in
// which of them they write; but a program cleans up what it has made in all of its modes.
func (n Names) owned() [][2]string {
	// A table of ipvs mode is beside that of nftables.
	return [][2]string{{"table", strings.TrimSuffix(n.Table, ".ipvs")}, {"chains", n.ChainPrefix}, {"device", n.Device}}
}

// inUse is the error that names who has the lock of a name.
func inUse(name [2]string, family v1.IPFamily, holder string) error {
	return fmt.Errorf("%w: %s %s of %s is programmed by %s: end it, or give one of the two other Names",
		ErrInUse, name[0], name[1], family, holder)
}
