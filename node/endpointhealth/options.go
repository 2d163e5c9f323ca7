package endpointhealth

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"reflect"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/invalid"
)

// CheckPolicy is how the endpoints of a service port are checked, and what follows. The zero value
// of each field but Probe means its default.
type CheckPolicy struct {
	// Probe checks an endpoint. Nil means that only reports about connections count; then an
	// endpoint returns when its time of ejection is over. It must be comparable.
	Probe Probe
	// Interval is the mean time from the start of one check to the start of the next; 0 means
	// 10s, the least is 10ms.
	Interval time.Duration
	// Timeout bounds a check, at most Interval; 0 means 1s, or Interval if that is less.
	Timeout time.Duration
	// Jitter is how much an interval may vary, as a share of it, below 1; 0 means 0.1. The first
	// check of an endpoint comes at a random time within one interval.
	Jitter float64
	// Failures is how many checks in a row must fail; 0 means 2. Successes is how many must
	// succeed for the return; 0 means 2. With the defaults, an endpoint that stops answering is
	// ejected within three intervals.
	Failures, Successes int
	// PassiveFailures is how many connections in a row must fail, of which each follows the one
	// before within 30s; 0 means 5, less than 0 that connections do not count. See
	// also Checker.Suspect.
	PassiveFailures int
	// EjectFor is how long the first ejection lasts at least; 0 means 30s. Each further one
	// lasts twice as long, at most MaxEjectFor; 0 means 5m. A doubling is forgotten for each
	// MaxEjectFor in which the endpoint does not fail.
	EjectFor, MaxEjectFor time.Duration
	// MaxEjected is the share of a service port's endpoints that may be ejected at once; 0 means
	// 0.5. The number is rounded down, so with one half the only endpoint stays, and one of two
	// or three may go.
	MaxEjected float64
	// SlowStart is the time in which a returning endpoint gets its whole share; 0 means at once.
	// SlowStartSteps is the number of steps, each of which is a sync; 0 means 4, the most is 32.
	SlowStart      time.Duration
	SlowStartSteps int
}

const (
	defaultInterval        = 10 * time.Second
	defaultTimeout         = time.Second
	defaultJitter          = 0.1
	defaultThreshold       = 2
	defaultPassiveFailures = 5
	defaultEjectFor        = 30 * time.Second
	defaultMaxEjectFor     = 5 * time.Minute
	defaultMaxEjected      = 0.5
	defaultSteps           = 4

	minInterval  = 10 * time.Millisecond
	maxSteps     = 32
	longestStart = 24 * time.Hour
	longest      = time.Duration(math.MaxInt64 / 4)
)

// WithDefaults returns p with every zero field set to its default.
func (p CheckPolicy) WithDefaults() CheckPolicy {
	p.Interval = cmp.Or(p.Interval, defaultInterval)
	p.Timeout = cmp.Or(p.Timeout, min(defaultTimeout, p.Interval))
	p.Jitter = cmp.Or(p.Jitter, defaultJitter)
	p.Failures = cmp.Or(p.Failures, defaultThreshold)
	p.Successes = cmp.Or(p.Successes, defaultThreshold)
	p.PassiveFailures = cmp.Or(p.PassiveFailures, defaultPassiveFailures)
	p.EjectFor = cmp.Or(p.EjectFor, defaultEjectFor)
	p.MaxEjectFor = cmp.Or(p.MaxEjectFor, max(defaultMaxEjectFor, p.EjectFor))
	p.MaxEjected = cmp.Or(p.MaxEjected, defaultMaxEjected)
	p.SlowStartSteps = cmp.Or(p.SlowStartSteps, defaultSteps)
	return p
}

// Validate reports every invalid field. Zero fields count as their defaults.
func (p CheckPolicy) Validate() error {
	p = p.WithDefaults()
	var errs invalid.Options
	errs.Check(p.Probe == nil || reflect.ValueOf(p.Probe).Comparable(), "Probe", reflect.TypeOf(p.Probe), "a comparable value, such as a pointer")
	errs.Check(p.Interval >= minInterval && p.Interval <= longest, "Interval", p.Interval, "at least 10ms")
	errs.Check(p.Timeout > 0 && p.Timeout <= p.Interval, "Timeout", p.Timeout, "more than 0, and at most Interval")
	errs.Check(p.Jitter > 0 && p.Jitter < 1, "Jitter", p.Jitter, "a share between 0 and 1")
	errs.Check(p.Failures > 0, "Failures", p.Failures, "at least 1")
	errs.Check(p.Successes > 0, "Successes", p.Successes, "at least 1")
	errs.Check(p.Probe != nil || p.PassiveFailures > 0, "PassiveFailures", p.PassiveFailures, "at least 1, as there is no Probe")
	errs.Check(p.EjectFor > 0 && p.EjectFor <= p.MaxEjectFor, "EjectFor", p.EjectFor, "more than 0, and at most MaxEjectFor")
	errs.Check(p.MaxEjectFor <= longest, "MaxEjectFor", p.MaxEjectFor, "less than 73 years")
	errs.Check(p.MaxEjected > 0 && p.MaxEjected <= 1, "MaxEjected", p.MaxEjected, "a share above 0, at most 1")
	errs.Check(p.SlowStart >= 0 && p.SlowStart <= longestStart, "SlowStart", p.SlowStart, "0 to 24h")
	errs.Check(p.SlowStartSteps > 0 && p.SlowStartSteps <= maxSteps, "SlowStartSteps", p.SlowStartSteps, "1 to 32")
	return errors.Join(errs...)
}

// fits reports whether the endpoints of a protocol can be checked by the Probe.
func (p *CheckPolicy) fits(protocol v1.Protocol) error {
	if t, ok := p.Probe.(interface{ port() uint16 }); ok && t.port() == 0 && protocol != v1.ProtocolTCP {
		return fmt.Errorf("Probe: a %s port does not answer TCP: set the Port of the Probe, or use Func", protocol)
	}
	return nil
}

// check is the part of a CheckPolicy that says how one endpoint is checked. Service ports that
// agree on it share the checks.
func (p CheckPolicy) check() CheckPolicy {
	p.MaxEjected, p.SlowStart, p.SlowStartSteps = 0, 0, 0
	return p
}

// quota is how many endpoints of a list may be ejected.
func (p *CheckPolicy) quota(endpoints int) int {
	const rounding = 1e-9 // 0.3 × 10 is 3
	return max(0, min(int(p.MaxEjected*float64(endpoints)+rounding), endpoints-1))
}

// hold is how long the ejection of a level lasts, counted from 1.
func (p *CheckPolicy) hold(level int) time.Duration {
	d := p.EjectFor
	for ; level > 1 && d < p.MaxEjectFor; level-- {
		d *= 2
	}
	return min(d, p.MaxEjectFor)
}

// Proxy is the proxy whose endpoints are checked; *[proxier.Proxier] implements it. Several
// goroutines call its methods at once.
type Proxy interface {
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
	// or a CheckPolicy that Validate refuses, this is logged once, Status counts it, and the service
	// port is not checked.
	Choose func(port *changetracker.ServicePort) (policy CheckPolicy, ok bool, err error)
	// Concurrency is how many checks may run at once; 0 means 256. More wait: those of one namespace if
	// as many of them run as could begin, so that one namespace has at most half of all.
	Concurrency int
	// Rate is how many checks begin in a second at most; 0 means 1,000. The endpoints of one Service, in
	// an IP family, get a tenth of that: if they are too many for their CheckPolicy, each is checked less
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
	var errs invalid.Options
	errs.Check(o.Choose != nil, "Choose", "nil", "a function that returns a Policy for the service ports to check")
	errs.Check(o.Concurrency > 0, "Concurrency", o.Concurrency, "0 or more")
	errs.Check(o.Rate > 0, "Rate", o.Rate, "0 or more")
	errs.Check(o.Pause > 0, "Pause", o.Pause, "0 or more")
	return errors.Join(errs...)
}
