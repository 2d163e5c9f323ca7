package endpointhealth

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// Source is the proxy whose endpoints are checked; *[proxier.Proxier] implements it. Several
// goroutines call its methods at once.
type Source interface {
	// Tracker has the endpoints. The Checker only calls its method Override.
	Tracker() *changetracker.Tracker
	// Programmed returns the State that is in use; nil if there is none yet, or none of that
	// family.
	Programmed(family v1.IPFamily) *changetracker.State
	// Trigger requests a sync after Overrides.
	Trigger()
}

// Options configure New.
type Options struct {
	// Choose decides for each service port whether its endpoints are checked, and how. It must
	// be pure: it is called again only if the service port changes. What it needs of the Service's
	// annotations, changetracker.Options.DecorateService can put in Ext. If it returns an error,
	// or a Policy that Validate refuses, this is logged once, Status counts it, and the service
	// port is not checked.
	Choose func(port *changetracker.ServicePort) (policy Policy, ok bool, err error)
	// Concurrency is how many checks may run at once; 0 means 256. More wait: those of one namespace if
	// as many of them run as could begin, so that one namespace has at most half of all.
	Concurrency int
	// Rate is how many checks begin in a second at most; 0 means 1,000. The endpoints of one Service, in
	// an IP family, get a tenth of that: if they are too many for their Policy, each is checked less
	// often. Namespaces take turns with checks that are due and must wait.
	Rate int
	// Pause is the least time between two syncs that the Checker asks for; 0 means 1s. Decisions
	// wait for a tenth of it, so that several of them become one sync. It is also how often the
	// State is read for new endpoints.
	Pause time.Duration
	// NetNS is that of proxier.Config: the network namespace from which to check. Empty means
	// that of the process. With it, a check occupies a thread while it connects.
	NetNS string
	// Logger receives one line for each ejection and each return; nil means no logging.
	Logger *zap.Logger
}

const (
	defaultConcurrency = 256
	defaultRate        = 1000
	serviceShare       = 10 // of Rate
	defaultPause       = time.Second
	gatherShare        = 10 // of Pause
)

func (o Options) withDefaults() Options {
	o.Concurrency = cmp.Or(o.Concurrency, defaultConcurrency)
	o.Rate = cmp.Or(o.Rate, defaultRate)
	o.Pause = cmp.Or(o.Pause, defaultPause)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	return o
}

// Validate reports every invalid option.
func (o Options) Validate() error {
	o = o.withDefaults()
	var errs []error
	check := func(ok bool, field string, value any, want string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %v: want %s", field, value, want))
		}
	}
	check(o.Choose != nil, "Choose", "nil", "a function that returns a Policy for the service ports to check")
	check(o.Concurrency > 0, "Concurrency", o.Concurrency, "0 or more")
	check(o.Rate > 0, "Rate", o.Rate, "0 or more")
	check(o.Pause > 0, "Pause", o.Pause, "0 or more")
	return errors.Join(errs...)
}
