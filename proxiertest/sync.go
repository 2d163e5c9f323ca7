package proxiertest

import (
	"context"
	"errors"

	"github.com/serviceplane/serviceplane/proxier"
)

// Sync waits for a sync of a Provider. It returns nil if everything is programmed: it also returns the
// failures of single service ports, which are no error of Provider.Sync.
func Sync(ctx context.Context, p interface {
	Sync(ctx context.Context) error
	Status() proxier.Status
},
) error {
	errs := []error{p.Sync(ctx)}
	for _, family := range p.Status().Families {
		for _, failed := range family.Failed {
			errs = append(errs, failed)
		}
	}
	return errors.Join(errs...)
}
