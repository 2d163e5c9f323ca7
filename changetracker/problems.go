package changetracker

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"
)

// Problem is one value of an API object that is set aside. The other values of the object are
// still used, as far as they make sense alone.
type Problem struct {
	// Object is the kind, namespace and name: "Service default/web", with " of source west"
	// for an object of that Source.
	Object string
	// Field is the path of the value in the object: "spec.externalIPs[1]".
	Field string
	// Value is the offending value as text, cut to a readable length.
	Value string
	// Reason is why: one of the Reason constants, so it is fit for a metric label.
	Reason Reason
}

// Reason is why a value is set aside. The set is bounded.
type Reason string

// The reasons for a Problem.
const (
	ReasonInvalidAddress  Reason = "invalid address"
	ReasonInvalidCIDR     Reason = "invalid CIDR"
	ReasonInvalidPort     Reason = "invalid port"
	ReasonInvalidProtocol Reason = "invalid protocol"
	ReasonWrongFamily     Reason = "wrong IP family"
	ReasonNoPorts         Reason = "no ports"
	ReasonDuplicate       Reason = "duplicate"
	ReasonMissing         Reason = "missing value"
	// ReasonRefused is for an external IP that ObjectOptions do not accept, and for one or a load balancer IP
	// that no VIP may have (TRK-18).
	ReasonRefused Reason = "refused by policy"
	// ReasonTooMany is for a list of which a Service uses only the first values.
	ReasonTooMany Reason = "too many"
	// ReasonNoSourceRange is for source ranges of which none is valid and of the IP
	// family of a load balancer VIP.
	ReasonNoSourceRange Reason = "no source range of the IP family"
	// ReasonUnsupported is for a load balancing policy that the engine does not have.
	ReasonUnsupported Reason = "not supported by the engine"
)

// Reasons returns all reasons.
func Reasons() []Reason {
	return []Reason{
		ReasonInvalidAddress, ReasonInvalidCIDR, ReasonInvalidPort, ReasonInvalidProtocol,
		ReasonWrongFamily, ReasonNoPorts, ReasonDuplicate, ReasonMissing,
		ReasonRefused, ReasonTooMany, ReasonNoSourceRange, ReasonUnsupported,
	}
}

// maxValueBytes is how much of a value a Problem shows.
const maxValueBytes = 64

// The kinds of objects that can have problems.
const (
	kindService       = "Service"
	kindEndpointSlice = "EndpointSlice"
)

// objectKey names an API object.
type objectKey struct {
	from string // its Source
	kind string
	types.NamespacedName
}

func (k objectKey) String() string {
	text := k.kind + " " + k.NamespacedName.String()
	if k.from != "" {
		text += " of source " + k.from
	}
	return text
}

// findings collects the problems of one object while it is parsed. It allocates nothing for an
// object without problems.
type findings struct {
	object   objectKey
	problems []Problem
	more     int // problems that are not listed
}

// maxProblems is how many problems of an object are listed. Each is a line of the log, and an object of
// 1 MB could have a hundred thousand.
const maxProblems = 100

func (f *findings) add(reason Reason, value, field string, index ...any) {
	if len(f.problems) == maxProblems {
		f.more++
		return
	}
	f.problems = append(f.problems, Problem{
		Object: f.object.String(),
		Field:  fmt.Sprintf(field, index...),
		Value:  readable(value),
		Reason: reason,
	})
}

// list returns the problems, the last of which says how many more there are.
func (f *findings) list() []Problem {
	if f.more == 0 {
		return f.problems
	}
	return append(f.problems, Problem{Object: f.object.String(), Field: "more values", Value: strconv.Itoa(f.more), Reason: ReasonTooMany})
}

// readable cuts a value to maxValueBytes of valid UTF-8. The result shares no memory with the
// value, so that it does not keep a large object in memory.
func readable(value string) string {
	if len(value) > maxValueBytes {
		end := maxValueBytes
		for end > maxValueBytes-utf8.UTFMax && !utf8.RuneStart(value[end]) {
			end--
		}
		value = value[:end]
	}
	return strings.Clone(strings.ToValidUTF8(value, "?"))
}

// problemSet holds the current problems of all objects.
type problemSet struct {
	byObject map[objectKey][]Problem
	counts   map[Reason]int
}

func newProblemSet() problemSet {
	return problemSet{byObject: map[objectKey][]Problem{}, counts: map[Reason]int{}}
}

// replace stores the problems of an object in place of its previous ones, and returns the new
// ones.
func (s *problemSet) replace(f findings) (fresh []Problem) {
	old, problems := s.byObject[f.object], f.list()
	if len(old)+len(problems) == 0 {
		return nil
	}
	for _, p := range old {
		if s.counts[p.Reason]--; s.counts[p.Reason] == 0 {
			delete(s.counts, p.Reason)
		}
	}
	known := make(map[Problem]struct{}, len(old))
	for _, p := range old {
		known[p] = struct{}{}
	}
	for _, p := range problems {
		s.counts[p.Reason]++
		if _, ok := known[p]; !ok {
			fresh = append(fresh, p)
		}
	}
	if len(problems) == 0 {
		delete(s.byObject, f.object)
	} else {
		s.byObject[f.object] = problems
	}
	return fresh
}

// of returns the objects of a Source that have problems.
func (s *problemSet) of(from string) (objects []objectKey) {
	for object := range s.byObject {
		if object.from == from {
			objects = append(objects, object)
		}
	}
	return objects
}

func (s *problemSet) all() []Problem {
	var all []Problem
	for _, list := range s.byObject {
		all = append(all, list...)
	}
	slices.SortFunc(all, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.Object, b.Object), strings.Compare(a.Field, b.Field))
	})
	return all
}

func (s *problemSet) byReason() map[Reason]int { return maps.Clone(s.counts) }

// logLine is a warning that is written after the lock is released, because logging may block.
type logLine struct {
	message string
	fields  []zap.Field
}

func problemLine(p Problem) logLine {
	return logLine{message: "value set aside", fields: []zap.Field{
		zap.String("object", p.Object), zap.String("field", p.Field),
		zap.String("value", p.Value), zap.String("reason", string(p.Reason)),
	}}
}
