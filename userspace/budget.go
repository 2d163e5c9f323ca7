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
	"github.com/serviceplane/serviceplane/proxier"
)

// Budget shares the descriptors of this process among the clients of service ports.
// While there are enough, everybody gets some. When they are used up, the service
// port that has the most gives way to one that has fewer, and within a service port
// the client address that has the most: its connection, or UDP flow, that was quiet
// the longest is ended. A new TCP connection that would have the most itself is
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
	heavy  queue[*share] // the one first that has the most

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
// have (RLIMIT_NOFILE), but for those that are open already, and for a quarter, 4,096
// at most: these are for netlink, health checks, log files and the embedding program.
// An eighth of the budget is for pipes, by which the kernel passes on bytes.
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
	heavy   queue[*holder] // the one first that has the most
}

// holder is a client address of a service port.
type holder struct {
	addr   netip.Addr
	used   int
	place  int
	leases queue[*lease] // the one first that was quiet the longest
}

// lease is what one connection has, or one UDP client.
type lease struct {
	budget *Budget
	share  *share
	holder *holder
	n      int
	end    func() // when somebody else needs it
	last   atomic.Int64
	known  int64 // last, at the time when the queue was put in order
	place  int   // absent when it was given back
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
	// errNoDescriptors refuses a client.
	errNoDescriptors = errors.New("its service port has its part of the descriptors that this process may have")
	// errCrowdedOut ends one.
	errCrowdedOut = fmt.Errorf("%w: others need its descriptors", errCut)
)

// take lends n descriptors to a client of a service port; nil if there are none for
// it. end is called when somebody else needs them.
// replace takes those of another client of the service port in any case. news says
// that an operator should hear of it now.
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

// free is what is left; less than nothing when listening sockets have come. b.mu is
// held, here and in what follows.
func (b *Budget) free() int { return b.limit - b.fixed - b.used }

// yields chooses who gives way to a client of a service port; nil if nobody has to. s
// is nil if that has nothing yet. leaving are those who did so for the same client: one
// of them is no use where two are needed.
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

// steps bounds the search for who was quiet the longest, when all have something to
// say meanwhile.
const steps = 256

// quietest is the lease of the heaviest client that was quiet the longest. Clients do
// not touch the queues when they say something, so that is found out now.
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

// giveBack ends a lease, if it was not taken back before.
func (l *lease) giveBack() {
	l.budget.mu.Lock()
	defer l.budget.mu.Unlock()
	if l.place != absent {
		l.budget.drop(l)
	}
}

// touch says that the client is not quiet.
func (l *lease) touch() { l.last.Store(l.budget.stamp()) }

func (b *Budget) stamp() int64 { return int64(time.Since(b.began)) }

// listen counts listening sockets that have come, or gone. Clients make room.
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

// borrowPipe says whether there may be one more pipe; it is given back by returnPipe.
func (b *Budget) borrowPipe() bool {
	if b.lent.Add(1) <= b.pipes {
		return true
	}
	b.lent.Add(-1)
	return false
}

func (b *Budget) returnPipe() { b.lent.Add(-1) }

// Descriptors tells what clients have, and what became of those that were too many.
func (b *Budget) Descriptors() proxier.Descriptors {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := proxier.Descriptors{
		Used: b.used, Limit: max(b.limit-b.fixed, 0), Refused: b.refused, Ended: b.ended, ShortSince: b.short.lasts(time.Now()),
	}
	if len(b.heavy) > 0 {
		d.Most, d.MostUsed = b.heavy[0].name, b.heavy[0].used
	}
	return d
}

// shortage is a time in which somebody was refused or ended, again and again.
type shortage struct{ since, last, told time.Time }

// calm is how long after the last refusal a shortage is over, and how often an
// operator hears of one.
const calm = time.Minute

// note says that somebody was refused or ended, and returns whether to tell of it.
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

// lasts is when it began; zero if it is over.
func (s *shortage) lasts(now time.Time) time.Time {
	if now.Sub(s.last) >= calm {
		return time.Time{}
	}
	return s.since
}

// queued is what knows its place in a queue.
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

// place puts something into a queue, or where it belongs now.
func place[T queued[T]](q *queue[T], one T) {
	if at := *one.at(); at != absent {
		heap.Fix(q, at)
		return
	}
	heap.Push(q, one)
}
