package history

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
)

// EventKind says what happens in a step.
type EventKind string

// The kinds of steps.
const (
	SetService    EventKind = "set Service"
	DeleteService EventKind = "delete Service"
	SetSlice      EventKind = "set EndpointSlice"
	DeleteSlice   EventKind = "delete EndpointSlice"
	SetNode       EventKind = "set node"
	RunSync       EventKind = "sync"
	Fail          EventKind = "fail"     // the call with number Call from now fails
	Lose          EventKind = "lose"     // its answer is lost
	Hang          EventKind = "hang"     // it has no answer until its time is over
	Kill          EventKind = "kill"     // the process dies before it, or after it if Late
	DamageKernel  EventKind = "damage"   // another program changes our objects now
	DamageAt      EventKind = "beside"   // it does so before a call, after it if Late, and at both if Twice
	Restart       EventKind = "restart"  // the process ends and starts again
	Cleanup       EventKind = "cleanup"  // the process ends, and its objects are removed, before it starts again
	Inspect       EventKind = "inspect"  // the process ends, another program changes our objects, and Verify must name that
	ChangeMode    EventKind = "mode"     // the process ends, and that of another engine starts, if the Plane has Modes
	Refuse        EventKind = "refuse"   // the engine cannot program the ports of a Service for Call tries, or at all if Late
	Busy          EventKind = "busy"     // from now on events never pause, until all that may be programmed is
	Converge      EventKind = "converge" // all faults end; then the kernel must become right
)

// Event is one step of a history. It does not depend on the steps before it.
type Event struct {
	Kind    EventKind
	Service *v1.Service              // of SetService, DeleteService and Refuse
	Slice   *discovery.EndpointSlice // of SetSlice and DeleteSlice
	Node    changetracker.Node
	Call    int
	Error   syscall.Errno
	Late    bool
	Twice   bool
	Next    bool // the calls are those of the next process
	Damage  int  // chooses the damage, or the engine
}

// String prints a step in one line.
func (s Event) String() string {
	switch s.Kind {
	case SetService, DeleteService:
		return fmt.Sprintf("%s %s: %s %v affinity %s, policies %s %s, ports %v, external %v, load balancer %v %v", s.Kind, s.Service.Name,
			s.Service.Spec.Type, s.Service.Spec.ClusterIPs, s.Service.Spec.SessionAffinity, *s.Service.Spec.InternalTrafficPolicy,
			s.Service.Spec.ExternalTrafficPolicy, portsText(s.Service), s.Service.Spec.ExternalIPs,
			s.Service.Status.LoadBalancer.Ingress, s.Service.Spec.LoadBalancerSourceRanges)
	case SetSlice, DeleteSlice:
		return fmt.Sprintf("%s %s: %v", s.Kind, s.Slice.Name, endpointsText(s.Slice))
	case SetNode:
		return fmt.Sprintf("%s %+v", s.Kind, s.Node)
	case Fail, Lose, Hang:
		return fmt.Sprintf("%s call %d: %v", s.Kind, s.Call, s.Error)
	case Refuse:
		return fmt.Sprintf("%s %s %d times, terminal %t: %v", s.Kind, s.Service.Name, s.Call, s.Late, s.Error)
	case Kill:
		return fmt.Sprintf("%s at call %d, late %t", s.Kind, s.Call, s.Late)
	case DamageKernel, Inspect, ChangeMode:
		return fmt.Sprintf("%s %d", s.Kind, s.Damage)
	case DamageAt:
		return fmt.Sprintf("%s call %d: damage %d, late %t, twice %t", s.Kind, s.Call, s.Damage, s.Late, s.Twice)
	default:
		return string(s.Kind)
	}
}

func portsText(s *v1.Service) (texts []string) {
	for _, p := range s.Spec.Ports {
		texts = append(texts, fmt.Sprintf("%s %d/%d", p.Protocol, p.Port, p.NodePort))
	}
	return texts
}

func endpointsText(s *discovery.EndpointSlice) string {
	var texts []string
	for _, e := range s.Endpoints {
		texts = append(texts, fmt.Sprintf("%s on %s ready %t serving %t", e.Addresses[0], *e.NodeName, *e.Conditions.Ready, *e.Conditions.Serving))
	}
	return strings.Join(texts, ", ")
}

// text prints the steps of a history.
func text(steps []Event) string {
	var lines strings.Builder
	for i := range steps {
		fmt.Fprintf(&lines, "%3d %v\n", i, &steps[i])
	}
	return lines.String()
}

// damagesPerLife limits the changes by other programs between two restarts: after more of
// them repairs wait, as package proxier documents.
const damagesPerLife = 2

// writer makes up a history.
type writer struct {
	dice

	damages int // since the last restart
	last    *Event
}

// begin returns the first steps of a history: the node, and n times a Service and a slice.
func (d dice) begin(n int) []Event {
	return append([]Event{{Kind: SetNode, Node: changetracker.Node{Name: "here", Zone: "x"}}}, d.objects(n)...)
}

func (d dice) objects(n int) (steps []Event) {
	for range n {
		steps = append(steps, Event{Kind: SetService, Service: d.service()}, Event{Kind: SetSlice, Slice: d.slice()})
	}
	return steps
}

// New returns the history of a seed. It ends with Converge.
func New(seed uint64, length int) []Event {
	w := writer{dice: dice{rand.New(rand.NewPCG(seed, 20))}}
	steps := w.begin(3)
	for range length {
		if w.IntN(7) == 0 {
			steps = append(steps, Event{Kind: Converge, Late: w.IntN(2) == 0})
			if w.IntN(3) == 0 {
				steps = append(steps, Event{Kind: Inspect, Damage: w.IntN(1000)})
			}
			continue
		}
		steps = append(steps, w.step())
	}
	return append(steps, Event{Kind: Converge})
}

func (w *writer) step() Event {
	if n := w.IntN(20); n < 13 {
		s := w.event(n)
		w.last = &s
		return s
	}
	return w.accident()
}

func (w *writer) event(n int) Event {
	switch n {
	case 0:
		return Event{Kind: DeleteService, Service: w.service()}
	case 1:
		return Event{Kind: DeleteSlice, Slice: w.slice()}
	case 2:
		return Event{Kind: SetNode, Node: w.node()}
	case 3:
		if w.last != nil { // the same event again, or the same endpoints in another order
			return w.again(*w.last)
		}
		fallthrough
	case 4, 5, 6, 7:
		return Event{Kind: SetService, Service: w.service()}
	default:
		return Event{Kind: SetSlice, Slice: w.slice()}
	}
}

func (w *writer) again(s Event) Event {
	if s.Kind == SetSlice {
		s.Slice = s.Slice.DeepCopy()
		w.Shuffle(len(s.Slice.Endpoints), func(i, j int) {
			s.Slice.Endpoints[i], s.Slice.Endpoints[j] = s.Slice.Endpoints[j], s.Slice.Endpoints[i]
		})
	}
	return s
}

// Errors are what calls to the kernel fail with.
var Errors = []syscall.Errno{ // read-only
	syscall.ENOBUFS, syscall.EINTR, syscall.EBUSY, syscall.EPERM, syscall.ENOSPC, syscall.ENOMEM, syscall.ETIMEDOUT, syscall.EAGAIN,
}

func (w *writer) accident() Event {
	s := Event{Call: w.IntN(12), Late: w.IntN(2) == 0}
	switch kind := oneOf(w.dice, RunSync, RunSync, Fail, Fail, Lose, Hang, Kill, Kill, DamageKernel, DamageAt, DamageAt, Restart, Cleanup, ChangeMode, Refuse, Refuse, Refuse, Busy); {
	case slices.Contains([]EventKind{DamageKernel, DamageAt}, kind) && w.damages == damagesPerLife:
		s.Kind = RunSync
	case kind == DamageKernel || kind == DamageAt:
		s.Kind, s.Damage, s.Twice = kind, w.IntN(1000), w.IntN(3) == 0
		w.damages++
	case kind == Refuse:
		s.Kind, s.Service, s.Call, s.Error = kind, w.service(), oneOf(w.dice, 1, 2, 5, 1000), oneOf(w.dice, Errors...)
	default:
		s.Kind, s.Error, s.Damage = kind, oneOf(w.dice, Errors...), w.IntN(1000)
		if slices.Contains([]EventKind{Restart, Cleanup, Inspect, ChangeMode}, kind) {
			w.damages = 0
		}
	}
	return s
}
