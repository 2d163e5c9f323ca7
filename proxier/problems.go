package proxier

import (
	"maps"
	"slices"
	"strconv"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// updateConflicts records the service ports that do not get what they ask for, a frontend or
// their load balancing policy, or the fast path, and logs new conflicts.
func (f *family) updateConflicts(update *desired.Update) {
	if update.Full {
		maps.DeleteFunc(f.denied, func(name changetracker.ServicePortName, _ *desired.Service) bool {
			_, exists := update.Now.View().State().Service(name)
			return !exists
		})
	}
	for i := range update.Changes {
		name, s := update.Changes[i].Name, update.Changes[i].After
		before := f.denied[name]
		if s == nil || len(s.Lost)+len(s.Refused)+len(f.unsupported(s)) == 0 {
			delete(f.denied, name)
			continue
		}
		f.denied[name] = s
		f.logConflicts(update.Now, before, s)
	}
	if !update.Full && !slices.ContainsFunc(update.Changes, changesFrontends) {
		return
	}
	conflicts := f.listConflicts(update.Now)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.conflicts = conflicts
}

// logConflicts logs what a service port lacks now and did not lack before; before may be nil.
func (f *family) logConflicts(now *desired.Resolved, before, s *desired.Service) {
	if before == nil {
		before = &desired.Service{Port: &changetracker.ServicePort{}}
	}
	if len(s.Lost) > 0 && !slices.Equal(s.Lost, before.Lost) {
		owner, _ := now.Owner(s.Lost[0])
		f.log.Warn("frontend belongs to another service port: remove it from one of the two Services", zap.Stringer("service", s.Name),
			zap.Stringer("frontend", s.Lost[0]), zap.Stringer("owner", owner))
	}
	if len(s.Refused) > 0 && !slices.Equal(s.Refused, before.Refused) {
		f.log.Warn("addresses of a Service refused, they are the API server's, the node's or its pods': remove them from the Service",
			zap.Stringer("service", s.Name), zap.Stringers("addresses", listed(s.Refused)), zap.Int("all", len(s.Refused)))
	}
	if !f.balances(s) && before.Port.Balancing != s.Port.Balancing {
		f.log.Warn("the engine does not have the load balancing policy of the service port, and chooses endpoints at random: choose another policy or engine",
			zap.Stringer("service", s.Name), zap.Stringer("policy", s.Port.Balancing))
	}
}

// balances reports whether the engine has the load balancing policy of a service port, or follows it by weights.
func (f *family) balances(s *desired.Service) bool {
	return f.traits(s).Balancing(s) == s.Port.Balancing || s.Port.Balancing == changetracker.LeastConnections && f.config.LeastConnections
}

// traits are the engine's for a service port, and what the program adds to them.
func (f *family) traits(s *desired.Service) desired.Traits {
	t := f.engine.Traits(s)
	t.LeastByWeights = f.config.LeastConnections
	return t
}

// unsupported lists what a service port asks for and the engine does not have.
func (f *family) unsupported(s *desired.Service) (values []string) {
	if !f.balances(s) {
		values = append(values, "load balancing policy "+s.Port.Balancing.String())
	}
	if f.ending == nil && f.conntrack != nil && s.EndsConnections() && !f.engine.Traits(s).SourceLost {
		values = append(values, "ended connections")
	}
	if !s.Port.ClientLimit.IsZero() && !f.engine.Traits(s).ClientLimits {
		values = append(values, "client limit")
	}
	if s.Port.FastPath && !f.engine.Traits(s).FastPath {
		values = append(values, "fast path")
	}
	return values
}

// changesFrontends reports whether a change may affect more than endpoints. The Source of a service port
// that always failed, and is gone now, has neither Before nor After.
func changesFrontends(c desired.Change) bool {
	return c.After == nil || c.Source == nil || c.Source.Before != c.Source.After
}

// maxListed is how many frontends or external IPs of a service port are listed. A Service of 1 MB has 65,536.
const maxListed = 100

func listed[T any](all []T) []T { return all[:min(len(all), maxListed)] }

// listConflicts lists what service ports ask for and do not get.
func (f *family) listConflicts(now *desired.Resolved) []changetracker.Problem {
	refused := map[changetracker.Problem]bool{} // a set: several ports of a Service have the same address
	var problems []changetracker.Problem
	for name, s := range f.denied {
		object := "Service " + name.NamespacedName.String()
		if more := max(len(s.Lost), len(s.Refused)) - maxListed; more > 0 {
			problems = append(problems, changetracker.Problem{
				Object: object, Field: "port " + name.Port, Value: strconv.Itoa(more) + " more addresses", Reason: changetracker.ReasonTooMany,
			})
		}
		for _, a := range listed(s.Refused) {
			field := "spec.externalIPs"
			if slices.Contains(s.Port.LoadBalancerVIPs, a) {
				field = "status.loadBalancer.ingress"
			}
			refused[changetracker.Problem{Object: object, Field: field, Value: a.String(), Reason: changetracker.ReasonRefused}] = true
		}
		for _, value := range f.unsupported(s) {
			problems = append(problems, changetracker.Problem{
				Object: object, Field: "port " + name.Port, Value: value, Reason: changetracker.ReasonUnsupported,
			})
		}
		for _, k := range listed(s.Lost) {
			owner, _ := now.Owner(k)
			problems = append(problems, changetracker.Problem{
				Object: object, Field: "port " + name.Port, Value: k.String() + " belongs to " + owner.String(), Reason: changetracker.ReasonDuplicate,
			})
		}
	}
	return slices.AppendSeq(problems, maps.Keys(refused))
}

// problemCounts counts the entries of Status.Problems by reason.
func problemCounts(t *changetracker.Tracker, families []*family) map[changetracker.Reason]int {
	counts := t.ProblemCounts()
	for _, f := range families {
		f.locked(func() {
			for _, c := range f.conflicts {
				counts[c.Reason]++
			}
			if f.ports.limited > 0 {
				counts[changetracker.ReasonTooMany] += f.ports.limited
			}
		})
	}
	return counts
}
