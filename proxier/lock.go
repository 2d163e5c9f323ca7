package proxier

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// Owner is an Engine that writes objects with the instance's Names, of which a
// network namespace has one set. A Proxier with such an engine keeps other processes
// with the same Names from writing at the same time.
type Owner interface {
	OwnsNames() bool
}

// ErrInUse says that another process programs objects with the same Names in the same
// network namespace. Syncs fail until that process has ended, and are retried; Cleanup
// does nothing. The error names the process.
var ErrInUse = errors.New("the names are in use")

// squatted is the error of a lock that a process has which may not program anything.
type squatted struct{ error }

// ownsNames says whether an engine needs the lock.
func ownsNames(engine any) bool {
	owner, ok := engine.(Owner)
	return ok && owner.OwnsNames()
}

// hold takes the lock of a family, or keeps it. Any local user can squat on its name,
// which must not keep the node from having Services: that is said and passed over.
// Providers of one process are that program's own affair.
func (p *Proxier) hold(f *family) error {
	if f.lock.held() || !ownsNames(f.engine) {
		f.lock.tidy()
		return nil
	}
	err := f.lock.take(&p.config, f.name)
	if squat := (squatted{}); errors.As(err, &squat) {
		if f.squatted != err.Error() {
			p.log.Warn("going on without the lock that keeps others with the same names away", zap.Error(err))
		}
		f.squatted, err = err.Error(), nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	before := f.taken
	switch {
	case !errors.Is(err, ErrInUse):
		f.taken = Condition{}
	case before.Message != err.Error():
		f.taken = Condition{Type: ConditionInUse, Family: f.name, Since: time.Now(), Message: err.Error()}
		f.log.Warn("another process programs the same objects; nothing is written until it has ended", zap.Error(err))
	}
	return err
}

// holdAll takes the locks of all families.
func (p *Proxier) holdAll() error {
	var errs []error
	for _, f := range p.families {
		errs = append(errs, p.hold(f))
	}
	return errors.Join(errs...)
}

// release lets others have the locks.
func (p *Proxier) release() {
	for _, f := range p.families {
		f.lock.release()
	}
}

// inUse is the error that names who has the lock.
func inUse(c *Config, holder string) error {
	return fmt.Errorf("%w: instance %q (table %s) is programmed by %s: end it, or give one of the two other Names",
		ErrInUse, c.Names.Instance, c.Names.Table, holder)
}
