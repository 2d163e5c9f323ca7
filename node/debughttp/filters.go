package debughttp

import (
	"slices"
	"strings"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// filters is a set of the properties that the list of Services can be filtered by.
type filters uint16

const (
	isFailed filters = 1 << iota
	hasNoEndpoints
	isDropping
	isLost
	isEjected
	isExternal
	hasAffinity
	isBalancing
)

// filterNames are the names of the filters in requests and responses, in order of their bits.
var filterNames = [...]string{ // read-only
	"failed", "no-endpoints", "dropping", "lost", "ejected", "external", "affinity", "balancing",
}

func (q query) filters() (wanted filters, err error) {
	for _, list := range q.values["filter"] {
		for name := range strings.SplitSeq(list, ",") {
			i := slices.Index(filterNames[:], name)
			if i < 0 && name != "" {
				return 0, &parameterError{"filter", "want some of " + strings.Join(filterNames[:], ", ") + ", separated by commas"}
			}
			if i >= 0 {
				wanted |= 1 << i
			}
		}
	}
	return wanted, nil
}

// filtersOf returns the properties of a service port, except isFailed.
func filtersOf(s *desired.Service, endpoints []changetracker.Endpoint) (f filters) {
	set := func(bit filters, has bool) {
		if has {
			f |= bit
		}
	}
	set(isLost, len(s.Lost) > 0)
	set(isExternal, s.Port.ExternallyAccessible())
	set(hasAffinity, s.Affinity > 0)
	set(isBalancing, s.Port.Balancing != changetracker.Random)
	for i := range s.Frontends {
		set(hasNoEndpoints, s.Frontends[i].Action == desired.Reject)
		set(isDropping, drops(&s.Frontends[i]))
	}
	set(isEjected, slices.ContainsFunc(endpoints, func(e changetracker.Endpoint) bool { return e.Ejected }))
	return f
}

// drops reports whether a frontend drops what comes from outside.
func drops(f *desired.Frontend) bool {
	return f.Action == desired.Drop || f.Restricted && len(f.SourceRanges) == 0
}

// verdict is what becomes of the connections to a Service.
type verdict string

// The verdicts. The first one that is true counts.
const (
	verdictFailed      verdict = "failed"         // a service port could not be programmed
	verdictNoFrontends verdict = "no frontends"   // other Services have all of them, or none is programmed
	verdictNoEndpoints verdict = "no endpoints"   // all frontends reject
	verdictDrops       verdict = "drops"          // no frontend forwards, and some drop
	verdictRejectsSome verdict = "partly rejects" // some frontends reject
	verdictDropsSome   verdict = "partly drops"   // some frontends drop
	verdictWorks       verdict = "works"
)

// actionCounts counts the frontends of a Service by what they do.
type actionCounts struct{ forward, reject, drop int }

func (t *actionCounts) add(s *desired.Service) {
	for i := range s.Frontends {
		switch f := &s.Frontends[i]; {
		case f.Action == desired.Reject:
			t.reject++
		case drops(f):
			t.drop++
		default:
			t.forward++
		}
	}
}

func (t *actionCounts) verdict() verdict {
	switch {
	case *t == actionCounts{}:
		return verdictNoFrontends
	case t.forward+t.drop == 0:
		return verdictNoEndpoints
	case t.forward == 0:
		return verdictDrops
	case t.reject > 0:
		return verdictRejectsSome
	case t.drop > 0:
		return verdictDropsSome
	default:
		return verdictWorks
	}
}
