package userspace

import (
	"container/heap"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier/connection"
)

// Budget shares the descriptors of this process among the clients of service ports.
// While enough are free, every client gets them. When none is free, the service port
// with the most descriptors gives some to a service port with fewer. Within a service
// port, the client address with the most gives them: its TCP connection or UDP flow
// that has been idle longest ends. A new TCP connection whose client would then have
// the most is reset; a new UDP client replaces another one of its service port. This is
// max-min fairness: no client below an equal share is refused while another is above it.
//
// Listening sockets count too, and are never refused. Several goroutines, and several
// Providers, may call the methods at once.
type Budget struct {
	limit      int       // for clients and listening sockets together
	maxPipes   int64     // for splice(2), not part of limit
	began      time.Time // lease times are durations since then
	pipesInUse atomic.Int64
	idlePipes  sync.Pool  // of *pipe
	mu         sync.Mutex // guards all below
	listening  int        // descriptors of listening sockets
	used       int        // descriptors of clients
	shares     map[changetracker.ServicePortName]*share
	byUsage    queue[*share] // the highest usage first

	refused, ended int
	shortage       shortage
}

const (
	descriptorsPerConnection = 2 // of a TCP client: its socket and the endpoint's
	descriptorsPerFlow       = 1 // of a UDP client: the endpoint's socket
	descriptorsPerPipe       = 2

	// pipeFraction is the fraction of a budget that pipes may use: an eighth.
	pipeFraction = 8
	// The program keeps a quarter of the process's limit for itself, but at most
	// maxReserve.
	reserveFraction, maxReserve = 4, 4096
	// assumedOpen is the assumed number of open descriptors where the system cannot
	// list them.
	assumedOpen = 32
	// maxDescriptors replaces a process limit that is absent, unreadable or higher.
	maxDescriptors = 1 << 20
)

// NewBudget returns a budget of this many descriptors. 0 means the limit of the process
// (RLIMIT_NOFILE) less the descriptors that are open already, and less a quarter of the
// limit, but at most 4,096, for netlink, health checks, log files and the embedding
// program. An eighth of the budget is for the pipes of splice(2).
func NewBudget(descriptors int) *Budget {
	if descriptors <= 0 {
		limit := min(processLimit(), maxDescriptors)
		descriptors = limit - min(limit/reserveFraction, maxReserve) - openDescriptors()
	}
	pipes := max(descriptors, 0) / pipeFraction
	return &Budget{
		limit: descriptors - pipes, maxPipes: int64(pipes / descriptorsPerPipe), began: time.Now(),
		shares: map[changetracker.ServicePortName]*share{},
	}
}

// share is what the clients of a service port use of a budget.
type share struct {
	name    changetracker.ServicePortName
	used    int
	pos     int
	clients map[netip.Addr]*clientShare
	byUsage queue[*clientShare] // the highest usage first
}

// clientShare is what a client address uses of a service port's share.
type clientShare struct {
	addr   netip.Addr
	used   int
	pos    int
	leases queue[*lease] // the longest idle first
}

// lease holds the descriptors of one TCP connection or UDP client.
type lease struct {
	budget     *Budget
	share      *share
	client     *clientShare
	n          int
	end        func() // ends the connection; called when another client needs the descriptors
	lastActive atomic.Int64
	sortedBy   int64 // lastActive when the queue was last ordered
	pos        int   // absent after release
}

func (s *share) before(o *share) bool { return s.used > o.used }
func (s *share) index() *int          { return &s.pos }

func (c *clientShare) before(o *clientShare) bool {
	return c.used > o.used || c.used == o.used && c.leases[0].sortedBy < o.leases[0].sortedBy
}
func (c *clientShare) index() *int { return &c.pos }

func (l *lease) before(o *lease) bool { return l.sortedBy < o.sortedBy }
func (l *lease) index() *int          { return &l.pos }

// take leases n descriptors to a client of a service port; it returns nil if the client
// is refused. The budget calls end when another client needs the descriptors. With
// replace, the service port's own clients make room even if this client has the most.
// logNow reports that clients were refused or ended and that it is time to log that.
func (b *Budget) take(name changetracker.ServicePortName, client netip.Addr, n int, replace bool, end func()) (l *lease, logNow bool) {
	b.mu.Lock()
	var evicted []*lease
	for b.free() < n {
		victim := b.victim(b.shares[name], client, n, replace, evicted)
		if victim == nil {
			break
		}
		b.drop(victim)
		evicted = append(evicted, victim)
	}
	enough := b.free() >= n
	if enough {
		l = b.add(name, client, n, end)
	} else {
		b.refused++
	}
	b.ended += len(evicted)
	logNow = (!enough || len(evicted) > 0) && b.shortage.note(time.Now())
	b.mu.Unlock()
	for _, victim := range evicted {
		victim.end()
	}
	return l, logNow
}

// free returns the number of free descriptors. It is negative after new sockets began
// to listen. The caller of free, victim, add and drop holds b.mu.
func (b *Budget) free() int { return b.limit - b.listening - b.used }

// victim chooses the lease that ends in favor of a client of a service port; nil if the
// client has no right to one. s is nil if the service port has no lease yet. evicted are
// the leases that ended for this client already: the comparison counts them as still
// held, since one client may need two.
func (b *Budget) victim(s *share, client netip.Addr, n int, replace bool, evicted []*lease) *lease {
	if len(b.byUsage) == 0 {
		return nil
	}
	own, ownOfClient := 0, 0
	if s != nil {
		own = s.used
		if c := s.clients[client]; c != nil {
			ownOfClient = c.used
		}
	}
	heaviest, taken, takenFromHeaviest := b.byUsage[0], 0, 0
	for _, l := range evicted {
		taken += l.n
		if l.share == heaviest {
			takenFromHeaviest += l.n
		}
		if l.share == s {
			own += l.n
		}
	}
	switch {
	case own+n < heaviest.used+takenFromHeaviest:
		return heaviest.idlest()
	case s == nil:
		return nil
	case replace || ownOfClient+n < s.byUsage[0].used+taken:
		return s.idlest()
	default:
		return nil
	}
}

// maxReorders bounds the search for the idlest connection while all of them are active.
const maxReorders = 256

// idlest returns the lease of the heaviest client that has been idle longest. Traffic
// does not reorder the queues, so idlest does.
func (s *share) idlest() *lease {
	for range maxReorders {
		c := s.byUsage[0]
		l := c.leases[0]
		last := l.lastActive.Load()
		if last == l.sortedBy {
			return l
		}
		l.sortedBy = last
		heap.Fix(&c.leases, l.pos)
		heap.Fix(&s.byUsage, c.pos)
	}
	return s.byUsage[0].leases[0]
}

func (b *Budget) add(name changetracker.ServicePortName, client netip.Addr, n int, end func()) *lease {
	s := b.shares[name]
	if s == nil {
		s = &share{name: name, pos: absent, clients: map[netip.Addr]*clientShare{}}
		b.shares[name] = s
	}
	c := s.clients[client]
	if c == nil {
		c = &clientShare{addr: client, pos: absent}
		s.clients[client] = c
	}
	l := &lease{budget: b, share: s, client: c, n: n, end: end, sortedBy: b.now()}
	l.lastActive.Store(l.sortedBy)
	heap.Push(&c.leases, l)
	b.used, s.used, c.used = b.used+n, s.used+n, c.used+n
	s.byUsage.update(c)
	b.byUsage.update(s)
	return l
}

// drop removes a lease.
func (b *Budget) drop(l *lease) {
	s, c := l.share, l.client
	heap.Remove(&c.leases, l.pos)
	l.pos = absent
	b.used, s.used, c.used = b.used-l.n, s.used-l.n, c.used-l.n
	if c.used > 0 {
		s.byUsage.update(c)
	} else {
		heap.Remove(&s.byUsage, c.pos)
		delete(s.clients, c.addr)
	}
	if s.used > 0 {
		b.byUsage.update(s)
	} else {
		heap.Remove(&b.byUsage, s.pos)
		delete(b.shares, s.name)
	}
}

// release returns the descriptors. It may be called more than once.
func (l *lease) release() {
	l.budget.mu.Lock()
	defer l.budget.mu.Unlock()
	if l.pos != absent {
		l.budget.drop(l)
	}
}

// touch records activity.
func (l *lease) touch() { l.lastActive.Store(l.budget.now()) }

// idle returns how long the connection has been idle.
func (l *lease) idle() time.Duration { return time.Duration(l.budget.now() - l.lastActive.Load()) }

func (b *Budget) now() int64 { return int64(time.Since(b.began)) }

// listen adds n listening sockets; n may be negative. If the limit is exceeded, clients
// are ended.
func (b *Budget) listen(n int) {
	b.mu.Lock()
	b.listening += n
	var evicted []*lease
	for b.free() < 0 && len(b.byUsage) > 0 {
		victim := b.byUsage[0].idlest()
		b.drop(victim)
		evicted = append(evicted, victim)
	}
	b.ended += len(evicted)
	if len(evicted) > 0 {
		b.shortage.note(time.Now())
	}
	b.mu.Unlock()
	for _, victim := range evicted {
		victim.end()
	}
}

// acquirePipe reports whether one more pipe may be used. If so, the caller calls
// releasePipe afterwards.
func (b *Budget) acquirePipe() bool {
	if b.pipesInUse.Add(1) <= b.maxPipes {
		return true
	}
	b.pipesInUse.Add(-1)
	return false
}

func (b *Budget) releasePipe() { b.pipesInUse.Add(-1) }

// Descriptors returns how many descriptors clients hold, and how many clients were
// refused or ended.
func (b *Budget) Descriptors() connection.Descriptors {
	b.mu.Lock()
	defer b.mu.Unlock()
	d := connection.Descriptors{
		Used: b.used, Limit: max(b.limit-b.listening, 0), Refused: b.refused, Ended: b.ended, ShortSince: b.shortage.began(time.Now()),
	}
	if len(b.byUsage) > 0 {
		d.Most, d.MostUsed = b.byUsage[0].name, b.byUsage[0].used
	}
	return d
}

// shortage is a period in which clients are refused or ended.
type shortage struct{ since, last, logged time.Time }

// shortageEnd is the time without a refusal after which a shortage is over. It is also
// the period at which a shortage is logged.
const shortageEnd = time.Minute

// note records that a client was refused or ended, and returns whether to log it.
func (s *shortage) note(now time.Time) (logNow bool) {
	if s.began(now).IsZero() {
		s.since = now
	}
	s.last = now
	if logNow = now.Sub(s.logged) >= shortageEnd; logNow {
		s.logged = now
	}
	return logNow
}

// began returns when the shortage began; zero if it is over.
func (s *shortage) began(now time.Time) time.Time {
	if now.Sub(s.last) >= shortageEnd {
		return time.Time{}
	}
	return s.since
}

// absent is the index of an item that is in no queue.
const absent = -1

// queued is an item that stores its index in a queue.
type queued[T any] interface {
	before(other T) bool
	index() *int
}

// queue is a priority queue. It implements heap.Interface.
type queue[T queued[T]] []T

func (q queue[T]) Len() int           { return len(q) }
func (q queue[T]) Less(i, j int) bool { return q[i].before(q[j]) }
func (q queue[T]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	*q[i].index(), *q[j].index() = i, j
}

// Push implements heap.Interface.
func (q *queue[T]) Push(x any) {
	item, _ := x.(T)
	*item.index() = len(*q)
	*q = append(*q, item)
}

// Pop implements heap.Interface.
func (q *queue[T]) Pop() any {
	last := len(*q) - 1
	item := (*q)[last]
	(*q)[last] = *new(T)
	*q = (*q)[:last]
	return item
}

// update puts an item into the queue, or moves it to its new position.
func (q *queue[T]) update(item T) {
	if i := *item.index(); i != absent {
		heap.Fix(q, i)
		return
	}
	heap.Push(q, item)
}
