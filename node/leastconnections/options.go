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
	// List calls each for every connection of a family that is open, with a number that only this connection has, and
	// its server: conntrack.OpenConnections. It returns an error if some may be missing.
	List func(ctx context.Context, family v1.IPFamily, each func(id uint64, protocol v1.Protocol, server netip.AddrPort)) error
	// Pause is the least time between two readings; 0 means 1s. It is longer after a reading that took more than a
	// twentieth of it, so that readings take a twentieth of the time at most.
	Pause time.Duration
	// Changes is how many weights may change after a reading; 0 means 1,000. Service ports take turns; one with more
	// endpoints has a turn alone.
	Changes int
	// Logger receives a line when connections cannot be read; nil means no logging.
	Logger *zap.Logger
}

const (
	defaultPause   = time.Second
	defaultChanges = 1000
	// readingShare is by how much longer the time between two readings is than a reading.
	readingShare = 20
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
