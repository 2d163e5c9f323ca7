package userspace

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

// budgetModel is a naive model of a budget.
type budgetModel struct {
	*Budget

	t      *testing.T
	random *rand.Rand
	listen int
	live   map[*lease]int64 // with their last activity
	ended  int              // calls of end
}

func budgetName(i int) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: fmt.Sprint(i)}, Protocol: v1.ProtocolTCP}
}

func budgetClient(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}) }

// has returns the descriptors of a service port, and of each of its clients.
func (m *budgetModel) has(name changetracker.ServicePortName) (all int, clients map[netip.Addr]int) {
	clients = map[netip.Addr]int{}
	for l := range m.live {
		if l.share.name == name {
			all += l.n
			clients[l.client.addr] += l.n
		}
	}
	return all, clients
}

// names returns the descriptors of each service port.
func (m *budgetModel) names() map[changetracker.ServicePortName]int {
	all := map[changetracker.ServicePortName]int{}
	for l := range m.live {
		all[l.share.name] += l.n
	}
	return all
}

// take calls Budget.take, and checks which leases were refused or ended.
func (m *budgetModel) take(name changetracker.ServicePortName, client netip.Addr, n int, replace bool) {
	own, ofClients := m.has(name)
	shares := m.names()
	shares[name] += 0
	equal := (m.limit - m.listen) / len(shares)
	m.ended = 0
	l, _ := m.Budget.take(name, client, n, replace, func() { m.ended++ })
	gone := m.gone()
	if len(gone) != m.ended {
		m.t.Fatalf("%d leases ended, with %d calls of end", len(gone), m.ended)
	}
	for _, e := range gone {
		m.mustYield(e, name, own+n, shares)
	}
	if l != nil {
		m.live[l] = l.sortedBy
		return
	}
	most := 0
	for _, has := range ofClients {
		most = max(most, has)
	}
	switch {
	case own+n <= equal:
		m.t.Fatalf("%v has %d and was refused %d more, want it to get the equal share of %d", name, own, n, equal)
	case replace && own > 0 && len(gone) == 0:
		m.t.Fatalf("%v has %d and got none of them for another client", name, own)
	case ofClients[client]+n < most:
		m.t.Fatalf("%v of %v has %d and was refused %d more, while another client has %d", client, name, ofClients[client], n, most)
	}
}

// gone returns the leases of the model that have ended in the budget.
func (m *budgetModel) gone() (gone []*lease) {
	for l := range m.live {
		if l.pos == absent {
			gone = append(gone, l)
		}
	}
	return gone
}

// mustYield checks that a lease was the right one to end, and removes it.
func (m *budgetModel) mustYield(l *lease, by changetracker.ServicePortName, wants int, shares map[changetracker.ServicePortName]int) {
	m.t.Helper()
	if l.share.name != by && shares[l.share.name] <= wants {
		m.t.Fatalf("a lease of %v, with %d descriptors, ended in favor of %v, with %d", l.share.name, shares[l.share.name], by, wants)
	}
	for o, last := range m.live {
		if o.client == l.client && o.pos != absent && last < m.live[l] {
			m.t.Fatalf("a client's lease of %v was ended, and one of %v was not", m.live[l], last)
		}
	}
	delete(m.live, l)
}

func (m *budgetModel) any() *lease {
	all := slices.SortedFunc(maps.Keys(m.live), func(a, b *lease) int { return int(a.sortedBy - b.sortedBy) })
	return all[m.random.IntN(len(all))]
}

// check compares the sums.
func (m *budgetModel) check() {
	m.t.Helper()
	sum := 0
	for l := range m.live {
		sum += l.n
	}
	if d := m.Descriptors(); d.Used != sum || d.Used > d.Limit || len(m.shares) != len(m.byUsage) {
		m.t.Fatalf("used %d of %d, want %d, and no more than the limit; %d service ports, %d in the queue", d.Used, d.Limit, sum, len(m.shares), len(m.byUsage))
	}
}

// In random histories, no service port below an equal share is refused, the lease that
// ends belongs to the heaviest and is the idlest, the sum stays within the limit, and
// nothing is left at the end.
func TestDescriptorsAreSharedFairly(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 5))
			m := &budgetModel{Budget: NewBudget(8 + random.IntN(60)), t: t, random: random, live: map[*lease]int64{}}
			services := 1 + random.IntN(8)
			for range 600 {
				time.Sleep(time.Nanosecond) // so that all times differ
				switch step := random.IntN(20); {
				case step < 12: // low numbers take more
					name, client := budgetName(min(random.IntN(services), random.IntN(services))), budgetClient(min(random.IntN(5), random.IntN(5)))
					if random.IntN(2) == 0 {
						m.take(name, client, descriptorsPerFlow, true)
					} else {
						m.take(name, client, descriptorsPerConnection, false)
					}
				case step < 14:
					if n := random.IntN(3) - 1; m.listen+n >= 0 && m.listen+n <= m.limit/2 {
						m.listen += n
						m.Budget.listen(n)
						for _, l := range m.gone() {
							delete(m.live, l)
						}
					}
				case len(m.live) == 0:
				case step < 17:
					l := m.any()
					l.touch()
					m.live[l] = l.lastActive.Load()
				default:
					l := m.any()
					l.release()
					l.release() // the second call does nothing
					delete(m.live, l)
				}
				m.check()
			}
			for l := range m.live {
				l.release()
			}
			m.Budget.listen(-m.listen)
			if m.used != 0 || m.listening != 0 || len(m.byUsage) != 0 || len(m.shares) != 0 {
				t.Errorf("left: %d used, %d for sockets, %d service ports", m.used, m.listening, len(m.shares))
			}
		})
	}
}

// Several goroutines use a budget at once.
func TestABudgetIsSafeForManyAtOnce(t *testing.T) {
	b := NewBudget(64)
	var running sync.WaitGroup
	var over atomic.Int64
	for i := range 8 {
		running.Go(func() {
			for j := range 300 {
				l, _ := b.take(budgetName(i%4), budgetClient(j%3), 1+i%2, i%2 == 0, func() {})
				if d := b.Descriptors(); d.Used > d.Limit {
					over.Store(int64(d.Used))
				}
				if l != nil {
					l.touch()
					defer l.release()
				}
			}
		})
	}
	running.Wait()
	if d := b.Descriptors(); d.Used != 0 || over.Load() != 0 {
		t.Errorf("%d are used at the end, and once there were %d, of %d", d.Used, over.Load(), d.Limit)
	}
}

// A shortage is logged once a minute, and reported until a minute without refusals.
func TestAnOperatorHearsOfAShortage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewBudget(descriptorsPerConnection + 1) // and none for pipes
		refuse := func() (news bool) {
			var l *lease
			if l, news = b.take(budgetName(1), budgetClient(1), descriptorsPerConnection, false, nil); l != nil {
				t.Fatal("want no room")
			}
			return news
		}
		if _, news := b.take(budgetName(0), budgetClient(0), descriptorsPerConnection, false, nil); news || !b.Descriptors().ShortSince.IsZero() {
			t.Error("news of a client that got what it needs")
		}
		since := time.Now()
		for i, want := range []bool{true, false, false, true, false} {
			if got := refuse(); got != want {
				t.Errorf("refusal %d is news: %v, want %v", i, got, want)
			}
			time.Sleep(20 * time.Second)
		}
		if d := b.Descriptors(); !d.ShortSince.Equal(since) || d.Refused != 5 || d.Most != budgetName(0) || d.MostUsed != descriptorsPerConnection {
			t.Errorf("%+v, want a shortage since %v, 5 refusals, and %v with %d", d, since, budgetName(0), descriptorsPerConnection)
		}
		time.Sleep(shortageEnd)
		if d := b.Descriptors(); !d.ShortSince.IsZero() {
			t.Errorf("%+v, want no shortage after a minute", d)
		}
	})
}

// By default, a budget leaves descriptors to the rest of the process.
func TestABudgetKnowsTheProcess(t *testing.T) {
	d, limit := NewBudget(0).Descriptors(), processLimit()
	if d.Limit <= 0 || d.Limit > limit-min(limit/reserveFraction, maxReserve) {
		t.Errorf("clients may have %d of %d, want a quarter or %d to be left", d.Limit, limit, maxReserve)
	}
	if one, other := (Config{}).WithDefaults(), (Config{}).WithDefaults(); one.Budget == other.Budget || one.WithDefaults().Budget != one.Budget {
		t.Error("want a budget for each configuration, and to keep it")
	}
}

// Flows end while they forward answers.
func TestEndpointsChangeWhileTheyAnswer(t *testing.T) {
	a, b := udpServer(t, "a"), udpServer(t, "b")
	e := engine(t)
	apply(t, e, web(v1.ProtocolUDP, a))
	to := at(t, e, RoleInternal)
	stop := make(chan struct{})
	var asking sync.WaitGroup
	for range 8 {
		conn := dialUDP(t, to)
		asking.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = conn.Write([]byte(strings.Repeat("x", 100)))
				}
			}
		})
	}
	for i := range 200 {
		endpoint := a
		if i%2 == 0 {
			endpoint = b
		}
		apply(t, e, web(v1.ProtocolUDP, endpoint)) // does not hang
	}
	close(stop)
	asking.Wait()
	_ = e.Close()
	if d := e.Abilities().Descriptors(); d.Used != 0 || e.config.Budget.listening != 0 {
		t.Errorf("%d descriptors are counted after the end, and %d of sockets, want none", d.Used, e.config.Budget.listening)
	}
}
