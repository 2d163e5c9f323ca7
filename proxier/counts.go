package proxier

import (
	"context"
	"errors"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Counts returns the numbers of connections in an IP family, and their traffic. Concurrent calls
// share one reading of the kernel. The error is errors.ErrUnsupported if Config.CountConnections
// and Config.CountTraffic are off or the engine cannot count. Callers share the slices of the
// answer, and must not change them.
func (p *Proxier) Counts(ctx context.Context, name v1.IPFamily) (connection.Counts, error) {
	for _, f := range p.families {
		if f.name == name {
			counts, err := f.counting.share(ctx, f.counts)
			if err != nil {
				err = fmt.Errorf("count connections of %s: %w", name, err)
			}
			return counts, err
		}
	}
	return connection.Counts{}, fmt.Errorf("count connections of %s: the engine cannot: %w", name, errors.ErrUnsupported)
}

// counts joins what the engine counts with what connection tracking does.
func (f *family) counts(ctx context.Context) (counts connection.Counts, err error) {
	if f.can.Counts != nil {
		counts, err = f.can.Counts(ctx)
	} else {
		err = fmt.Errorf("the engine cannot: %w", errors.ErrUnsupported)
	}
	if !f.traffic || err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return counts, err
	}
	return f.conntrack.AddTraffic(ctx, f.name, counts)
}

// sharedReading lets concurrent callers share a reading that begins after all of them called.
type sharedReading struct {
	mu   sync.Mutex
	next *pendingReading // has not begun; nil if nobody waits for it
	turn chan struct{}   // full while a reading runs
}

type pendingReading struct {
	done      chan struct{}
	abandoned bool // its caller has given up
	counts    connection.Counts
	err       error
}

// errNoReading is what others get if the reading panics.
var errNoReading = errors.New("the reading panicked")

func newSharedReading() *sharedReading { return &sharedReading{turn: make(chan struct{}, 1)} }

// share returns the outcome of a reading. The first caller runs it, with its own context.
func (s *sharedReading) share(ctx context.Context, read func(context.Context) (connection.Counts, error)) (connection.Counts, error) {
	for {
		s.mu.Lock()
		p, leads := s.next, s.next == nil
		if leads {
			p = &pendingReading{done: make(chan struct{})}
			s.next = p
		}
		s.mu.Unlock()
		if leads {
			s.run(ctx, p, read)
			return p.counts, p.err
		}
		select {
		case <-p.done:
		case <-ctx.Done():
			return connection.Counts{}, ctx.Err()
		}
		if !p.abandoned {
			return p.counts, p.err
		}
	}
}

func (s *sharedReading) run(ctx context.Context, p *pendingReading, read func(context.Context) (connection.Counts, error)) {
	defer close(p.done)
	begin := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.next = nil
	}
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }() // also if read panics, as the caller's program may survive
		begin()
		p.err = errNoReading
		p.counts, p.err = read(ctx)
	case <-ctx.Done():
		begin()
		p.err = ctx.Err()
	}
	p.abandoned = ctx.Err() != nil
}
