package history

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// refusals are the Services whose ports the engines of a process refuse.
type refusals struct {
	mu     sync.Mutex // guards all below
	byName map[string]*refusal
}

type refusal struct {
	left     int // tries that fail
	terminal bool
	err      error
	happened bool
}

// add adds a refusal, unless there is one of the Service: a terminal one must end as such.
func (r *refusals) add(s *Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.byName[s.Service.Name] == nil {
		r.byName[s.Service.Name] = &refusal{left: s.Call, terminal: s.Late, err: s.Error}
	}
}

func (r *refusals) has(service string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byName[service] != nil
}

// end ends the refusals that are terminal, or all others. It reports whether one of them had
// happened.
func (r *refusals) end(terminal bool) (happened bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, one := range r.byName {
		if one.terminal == terminal {
			happened = happened || one.happened
			delete(r.byName, name)
		}
	}
	return happened
}

// take returns the failure of a try to program a service port; nil if it may succeed.
func (r *refusals) take(c *desired.Change) *proxier.ServiceError {
	r.mu.Lock()
	defer r.mu.Unlock()
	one := r.byName[c.Name.Name]
	if one == nil || c.After == nil || !one.terminal && one.left == 0 {
		return nil
	}
	one.left--
	one.happened = true
	return &proxier.ServiceError{Name: c.Name, Err: one.err, Partial: true, Terminal: one.terminal}
}

// refusing is an engine that cannot program some service ports: it removes them from the kernel. It gets
// Updates of any size, which must all be good enough for an engine.
type refusing struct {
	proxier.Engine

	refusals *refusals
	part     int // as in Abilities
}

// Abilities implements proxier.Engine.
func (e refusing) Abilities() proxier.Abilities {
	can := e.Engine.Abilities()
	can.Part = e.part
	return can
}

// Apply implements proxier.Engine.
func (e refusing) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	u.Changes = slices.Clone(u.Changes)
	var refused []*proxier.ServiceError
	for i := range u.Changes {
		if failure := e.refusals.take(&u.Changes[i]); failure != nil {
			refused = append(refused, failure)
			u.Changes[i].After = nil
		}
	}
	result, err := e.Engine.Apply(ctx, u)
	result.Failed = append(result.Failed, refused...)
	return result, err
}

// endRefusals: while events never pause, all that may be programmed is programmed. Only terminal
// failures wait, for a full sync.
func (r *run) endRefusals() error {
	r.life.refusals.end(false)
	if err := r.soonNil(func() error { return mustHaveTried(r.life.Status()) }); err != nil {
		return fmt.Errorf("not all is tried again within %v: %w", r.patience, err)
	}
	r.life.quiet()
	if !r.life.refusals.end(true) {
		return nil
	}
	node := r.objects.Node // a change causes a full sync
	if node.PodCIDRs == nil {
		node.PodCIDRs = serviceCIDRs()
	} else {
		node.PodCIDRs = nil
	}
	r.event(&Event{Kind: SetNode, Node: node})
	return nil
}

func mustHaveTried(s proxier.Status) (err error) {
	if !s.Synced {
		err = errors.New("not synced")
	}
	for family, f := range s.Families {
		for _, e := range f.Failed {
			if !e.Terminal {
				err = errors.Join(err, fmt.Errorf("%s: %w", family, e))
			}
		}
		err = errors.Join(err, f.LastError)
	}
	return err
}

// noise has events that never pause.
type noise struct {
	stop   chan struct{}
	events chan uint64 // how many there were
}

// noisePause is less than what most syncs take.
const noisePause = 3 * time.Millisecond

// beNoisy changes a Service again and again, until quiet.
func (l *life) beNoisy() {
	if l.noise != nil {
		return
	}
	n := &noise{make(chan struct{}), make(chan uint64, 1)}
	l.noise = n
	service := func(port int32) *v1.Service {
		return proxiertest.Service(namespace, "noise", proxiertest.ClusterIPs("10.96.9.9", "fd00:96::9:9"), proxiertest.Port("http", v1.ProtocolTCP, port))
	}
	go func() {
		s := service(7000)
		l.OnServiceAdd(s)
		for events := uint64(1); ; events++ {
			select {
			case <-n.stop:
				l.OnServiceDelete(s)
				n.events <- events + 1
				return
			case <-time.After(noisePause):
			}
			next := service(7000 + int32(events%2))
			l.OnServiceUpdate(s, next)
			s = next
		}
	}()
}

func (l *life) quiet() {
	if l.noise != nil {
		close(l.noise.stop)
		l.told.Services += <-l.noise.events
		l.noise = nil
	}
}
