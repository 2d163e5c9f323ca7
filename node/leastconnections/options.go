package leastconnections

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/invalid"
)

// Lister calls each for every open connection of a family that has been translated, with a number that only this
// connection has, and with its endpoint. One that opens or ends meanwhile may be missing, or come twice. conntrack.OpenConnections
// returns one. It returns an error if more may be missing, and soon after the end of ctx.
type Lister = func(ctx context.Context, family v1.IPFamily, each func(id uint64, protocol v1.Protocol, endpoint netip.AddrPort)) error

// Proxy is the proxy whose endpoints get weights; *[proxier.Proxier] implements it.
type Proxy interface {
	// Tracker has the endpoints. The Balancer only calls its method Override.
	Tracker() *changetracker.Tracker
	// Programmed returns the State that is in use; nil if there is none yet, or none of that
	// family.
	Programmed(family v1.IPFamily) *changetracker.State
	// Trigger requests a sync after Overrides.
	Trigger()
}

// Options configure New.
type Options struct {
	// List lists open connections: conntrack.OpenConnections(netNS).
	List Lister
	// Pause is the least time between two readings; 0 means 1s. The pause is longer if a reading, and the time until its
	// Overrides were programmed, took more than a tenth of it: see the package documentation.
	Pause time.Duration
	// Changes is how many weights of a family may change after a reading; 0 means 1,000. A weight counts once for each
	// frontend of its service port. Service ports take turns. Weights that go back to those of slices, because readings
	// fail, the policy goes or the service port grows beyond Changes, do not wait for that.
	Changes int
	// Logger receives a line when connections cannot be read, every ten minutes at most; nil means no logging.
	Logger *zap.Logger
}

const (
	defaultPause   = time.Second
	defaultChanges = 1000
	// workShare is by how much longer a pause is than the work before it.
	workShare = 10
)

func (o Options) withDefaults() Options {
	o.Pause = cmp.Or(o.Pause, defaultPause)
	o.Changes = cmp.Or(o.Changes, defaultChanges)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	return o
}

// Validate reports every invalid option.
func (o Options) Validate() error {
	o = o.withDefaults()
	var errs invalid.Options
	errs.Check(o.List != nil, "List", "nil", "a function that lists open connections, such as conntrack.OpenConnections")
	errs.Check(o.Pause > 0, "Pause", o.Pause, "0 or more")
	errs.Check(o.Changes > 0, "Changes", o.Changes, "0 or more")
	return errors.Join(errs...)
}
