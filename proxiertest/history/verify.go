package history

import (
	"context"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// mustVerify: Verify finds nothing when the kernel is right. What drains may end meanwhile, if
// another program has changed it.
func (r *run) mustVerify(ctx context.Context) error {
	return r.soonNil(func() error { return r.verify(ctx) })
}

func (r *run) verify(ctx context.Context) error {
	found, err := r.life.Verify(ctx)
	for family, v := range found {
		if !v.Agrees() {
			err = errors.Join(err, v.Err, fmt.Errorf("verify %s: %d differences: %v", family, v.Total, v.Differences))
		}
	}
	return err
}

// inspect ends the process, and lets another program change our objects. Then Verify of another
// process, which has not programmed anything, must find what has changed, and nothing before.
// The next process must repair it.
func (r *run) inspect(ctx context.Context, damage int, converged bool) error {
	if hasSockets(r.plane) {
		return nil // the objects end with the process
	}
	if err := r.end(); err != nil {
		return err
	}
	before, err := r.plane.Kernel()
	if err != nil {
		return err
	}
	if found, err := r.differences(ctx); converged && (err != nil || len(found) > 0) {
		return errors.Join(err, fmt.Errorf("verify in a process that has not synced: %v", found))
	}
	r.plane.Damage(damage, &r.objects)
	after, err := r.plane.Kernel()
	if err != nil {
		return err
	}
	if found, err := r.differences(ctx); converged && (err != nil || before != after && len(found) == 0) {
		return errors.Join(err, fmt.Errorf("verify after a change by another program: found nothing of:\n%s", difference(after, before)))
	}
	return r.start(ctx)
}

// differences compares the kernel with the objects.
func (r *run) differences(ctx context.Context) (found []proxier.Difference, err error) {
	e, err := r.expect(ctx)
	if err != nil {
		return nil, err
	}
	engines, err := r.plane.Engines(r.config, &Calls{})
	for family, engine := range engines {
		more, failure := verifyOne(ctx, e, family, engine)
		found, err = append(found, more...), errors.Join(err, failure, engine.Close())
	}
	return found, err
}

func verifyOne(ctx context.Context, e *expected, family v1.IPFamily, engine proxier.Engine) ([]proxier.Difference, error) {
	verify := engine.Abilities().Verify
	if verify == nil {
		return nil, fmt.Errorf("the engine of %s cannot verify", family)
	}
	report, err := verify(ctx, e.updates[family])
	for _, d := range report.Differences {
		if d.Object == "" || d.Problem == "" {
			err = errors.Join(err, fmt.Errorf("a difference without a name: %+v", d))
		}
	}
	return report.Differences, err
}
