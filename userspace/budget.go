package userspace

import (
	"container/heap"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/userspace/connection"
)

// Budget shares the descriptors of this process among the clients of service ports.
// While there are enough, every client gets some. When they are used up, the service
// port that has the most gives way to one that has fewer, and within a service port
// the client address that has the most: its connection, or UDP flow, that has been idle
// longest is ended. A new TCP connection whose client would then have the most is
// reset; a new UDP client replaces another one of its service port. This is max-min
// fairness: nobody below an equal share is refused while somebody is above it.
//
// Sockets that listen count too, and are not refused. The methods may be called by
// several goroutines at once, and by several Providers.
type Budget struct {
	limit  int       // of everything
	pipes  int64     // how many there may be for splice(2) beside that
	began  time.Time // stamps count from then
	lent   atomic.Int64
	mu     sync.Mutex // guards all below
	fixed  int        // descriptors of listening sockets
	used   int        // descriptors of clients
	shares map[changetracker.ServicePortName]*share
	heavy  queue[*share] // the one with the most is first

	refused, ended int
	short          shortage
}

const (
	// perConnection and perFlow are the descriptors that a TCP connection and a UDP
	// client need.
	perConnection, perFlow = 2, 1
	// pipePart is the part of a budget that pipes may use.
	pipePart = 8
	// perPipe are the descriptors of a pipe.
	perPipe = 2
	// reservePart is the part of the process's limit that is kept for others, and
	// mostReserve the most that this comes to.
	reservePart, mostReserve = 4, 4096
	// unknownOpen stands for the descriptors that are open where nobody can tell.
	unknownOpen = 32
	// mostDescriptors is the limit of a process that has none, or that cannot be asked.
	mostDescriptors = 1 << 20
)

// NewBudget returns a budget of some descriptors. 0 means those that the process may
// have (RLIMIT_NOFILE), without those that are open already, and without a quarter,
// 4,096 at most, for netlink, health checks, log files and the embedding program.
// An eighth of the budget is for pipes, with which the kernel splices.
func NewBudget(descriptors int) *Budget {
	if descriptors <= 0 {
		limit := min(processLimit(), mostDescriptors)
		descriptors = limit - min(limit/reservePart, mostReserve) - openDescriptors()
	}
	pipes := max(descriptors, 0) / pipePart
	return &Budget{
		limit: descriptors - pipes, pipes: int64(pipes / perPipe), began: time.Now(),
		shares: map[changetracker.ServicePortName]*share{},
	}
}

// share is what a service port has of a budget.
type share struct {
	name    changetracker.ServicePortName
	used    int
	place   int
	clients map[netip.Addr]*holder
	heavy   queue[*holder] // the one with the most is first
}

// holder is a client address of a service port.
type holder struct {
	addr   netip.Addr
	used   int
	place  int
	leases queue[*lease] // the one that has been idle longest is first
}

// lease is what one connection has, or one UDP client.
type lease struct {
	budget *Budget
	share  *share
	holder *holder
	n      int
	end    func() // called when another client needs it
	last   atomic.Int64
	known  int64 // last, as of when the queue was ordered
	place  int   // absent after it was given back
}

// absent is the place of what is in no queue.
const absent = -1

func (s *share) before(o *share) bool { return s.used > o.used }
func (s *share) at() *int             { return &s.place }

func (h *holder) before(o *holder) bool {
	return h.used > o.used || h.used == o.used && h.leases[0].known < o.leases[0].known
}
func (h *holder) at() *int { return &h.place }

func (l *lease) before(o *lease) bool { return l.known < o.known }
func (l *lease) at() *int             { return &l.place }

var (
	// errNoDescriptors is why a client is refused.
	errNoDescriptors = errors.New("no descriptor is free, and its service port has its fair share: raise the limit of open files")
	// errCrowdedOut is why one is ended.
	errCrowdedOut = fmt.Errorf("%w: other clients need its descriptors: raise the limit of open files", errCut)
)

// take lends n descriptors to a client of a service port; nil if there are none for
// it. end is called when another client needs them. With replace, another client of the
// service port gives way in any case. news says that clients were refused or ended, and
// that the log should say so now.
func (b *Budget) take(name changetracker.ServicePortName, client netip.Addr, n int, replace bool, end func()) (l *lease, news bool) {
	b.mu.Lock()
	var leaving []*lease
	for b.free() < n {
		one := b.yields(b.shares[name], client, n, replace, leaving)
		if one == nil {
			break
		}
		b.drop(one)
		leaving = append(leaving, one)
	}
	enough := b.free() >= n
	if enough {
		l = b.add(name, client, n, end)
	} else {
		b.refused++
	}
	b.ended += len(leaving)
	news = (!enough || len(leaving) > 0) && b.short.note(time.Now())
	b.mu.Unlock()
	for _, one := range leaving {
		one.end()
	}
	return l, news
}

// free is what is left; negative when new sockets listen. The caller holds b.mu, here
// and in what follows.
func (b *Budget) free() int { return b.limit - b.fixed - b.used }

// yields chooses who gives way to a client of a service port; nil if nobody has to. s
// is nil if the service port has nothing yet. leaving are those who gave way to the same
// client already: they count as still there, since two may have to leave for one.
func (b *Budget) yields(s *share, client netip.Addr, n int, replace bool, leaving []*lease) *lease {
	if len(b.heavy) == 0 {
		return nil
	}
	own, ownOfClient := 0, 0
	if s != nil {
		own = s.used
		if h := s.clients[client]; h != nil {
			ownOfClient = h.used
		}
	}
	heaviest, taken, takenThere := b.heavy[0], 0, 0
	for _, l := range leaving {
		taken += l.n
		if l.share == heaviest {
			takenThere += l.n
		}
		if l.share == s {
			own += l.n
		}
	}
	switch {
	case own+n < heaviest.used+takenThere:
		return heaviest.quietest()
	case s == nil:
		return nil
	case replace || ownOfClient+n < s.heavy[0].used+taken:
		return s.quietest()
	default:
		return nil
	}
}

// steps bounds the search for the idlest client, when all send something meanwhile.
const steps = 256

// quietest is the lease of the heaviest client that has been idle longest. Clients do
// not reorder the queues when they send something, so that is done now.
func (s *share) quietest() *lease {
	for range steps {
		h := s.heavy[0]
		l := h.leases[0]
		last := l.last.Load()
		if last == l.known {
			return l
		}
		l.known = last
		heap.Fix(&h.leases, l.place)
		heap.Fix(&s.heavy, h.place)
	}
	return s.heavy[0].leases[0]
}

func (b *Budget) add(name changetracker.ServicePortName, client netip.Addr, n int, end func()) *lease {
	s := b.shares[name]
	if s == nil {
		s = &share{name: name, place: absent, clients: map[netip.Addr]*holder{}}
		b.shares[name] = s
	}
	h := s.clients[client]
	if h == nil {
		h = &holder{addr: client, place: absent}
		s.clients[client] = h
	}
	l := &lease{budget: b, share: s, holder: h, n: n, end: end, known: b.stamp()}
	l.last.Store(l.known)
	heap.Push(&h.leases, l)
	b.used, s.used, h.used = b.used+n, s.used+n, h.used+n
	place(&s.heavy, h)
	place(&b.heavy, s)
	return l
}

// drop takes a lease back.
func (b *Budget) drop(l *lease) {
	s, h := l.share, l.holder
	heap.Remove(&h.leases, l.place)
	l.place = absent
	b.used, s.used, h.used = b.used-l.n, s.used-l.n, h.used-l.n
	if h.used > 0 {
		place(&s.heavy, h)
	} else {
		heap.Remove(&s.heavy, h.place)
		delete(s.clients, h.addr)
	}
	if s.used > 0 {
		place(&b.heavy, s)
	} else {
		heap.Remove(&b.heavy, s.place)
		delete(b.shares, s.name)
	}
}

// giveBack ends a lease, unless it has ended.
func (l *lease) giveBack() {
	l.budget.mu.Lock()
	defer l.budget.mu.Unlock()
	if l.place != absent {
		l.budget.drop(l)
	}
}

// touch notes that the client is not idle.
func (l *lease) touch() { l.last.Store(l.budget.stamp()) }

// quiet is for how long the client has been.
func (l *lease) quiet() time.Duration { return time.Duration(l.budget.stamp() - l.last.Load()) }

func (b *Budget) stamp() int64 { return int64(time.Since(b.began)) }

// listen counts n more listening sockets, or less. Clients make room.
func (b *Budget) listen(n int) {
	b.mu.Lock()
	b.fixed += n
	var leaving []*lease
	for b.free() < 0 && len(b.heavy) > 0 {
		one := b.heavy[0].quietest()
		b.drop(one)
		leaving = append(leaving, one)
	}
	b.ended += len(leaving)
	if len(leaving) > 0 {
		b.short.note(time.Now())
	}
	b.mu.Unlock()
	for _, one := range leaving {
		one.end()
	}
}

// borrowPipe says whether there may be one more pipe; if so, returnPipe must follow.
func (b *Budget) borrowPipe() bool {
	if b.lent.Add(1) <= b.pipes {
		return true
	}
	b.lent.Add(-1)
	return false
}

func (b *Budget) returnPipe() { b.lent.Add(-1) }

// Descriptors says how many descriptors clients have, and how many were refused or ended.
func (b *Budget) Descriptors() connection.Descriptors {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := connection.Descriptors{
		Used: b.used, Limit: max(b.limit-b.fixed, 0), Refused: b.refused, Ended: b.ended, ShortSince: b.short.lasts(time.Now()),
	}
	if len(b.heavy) > 0 {
		d.Most, d.MostUsed = b.heavy[0].name, b.heavy[0].used
	}
	return d
}

// shortage is a time in which clients are refused or ended again and again.
type shortage struct{ since, last, told time.Time }

// calm is how long after the last refusal a shortage is over, and how often one is
// logged.
const calm = time.Minute

// note says that a client was refused or ended, and returns whether to log it.
func (s *shortage) note(now time.Time) (tell bool) {
	if s.lasts(now).IsZero() {
		s.since = now
	}
	s.last = now
	if tell = now.Sub(s.told) >= calm; tell {
		s.told = now
	}
	return tell
}

// lasts returns when the shortage began; zero if it is over.
func (s *shortage) lasts(now time.Time) time.Time {
	if now.Sub(s.last) >= calm {
		return time.Time{}
	}
	return s.since
}

// queued is an item that knows its place in a queue.
type queued[T any] interface {
	before(other T) bool
	at() *int
}

// queue implements heap.Interface.
type queue[T queued[T]] []T

func (q queue[T]) Len() int           { return len(q) }
func (q queue[T]) Less(i, j int) bool { return q[i].before(q[j]) }
func (q queue[T]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	*q[i].at(), *q[j].at() = i, j
}

// Push implements heap.Interface.
func (q *queue[T]) Push(x any) {
	one, _ := x.(T)
	*one.at() = len(*q)
	*q = append(*q, one)
}

// Pop implements heap.Interface.
func (q *queue[T]) Pop() any {
	last := len(*q) - 1
	one := (*q)[last]
	(*q)[last] = *new(T)
	*q = (*q)[:last]
	return one
}

// place puts an item into a queue, or moves it to where it belongs now.
func place[T queued[T]](q *queue[T], one T) {
	if at := *one.at(); at != absent {
		heap.Fix(q, at)
		return
	}
	heap.Push(q, one)
}
