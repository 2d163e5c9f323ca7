package informer

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/proxiertest/history"
)

// claims changes a cluster at random, and knows what each object was at each version of the
// API server.
type claims struct {
	*cluster
	slow   *slowEngine
	random *rand.Rand
	was    map[string][]valueAt // by object, oldest first
	last   map[string]uint64    // version of the last change, by kind
	breaks int                  // until the watches break
	away   bool
}

type valueAt struct {
	version uint64
	value   string // empty: there is no such object
}

// allows reports whether the engine may have this value of an object if it has everything up
// to a version: that of the version, or a later one.
func (c *claims) allows(object string, upTo uint64, value string) bool {
	allowed := []string{""}
	for _, v := range c.was[object] {
		if v.version <= upTo {
			allowed = allowed[:0]
		}
		allowed = append(allowed, v.value)
	}
	return slices.Contains(allowed, value)
}

// claimed returns the versions that the node says it has programmed, but for the service ports
// that failed; ok is false if it says none.
func (c *claims) claimed() (services, slices uint64, failed []*proxier.ServiceError, ok bool) {
	status := c.proxier.Status().Families[v1.IPv4Protocol]
	services, err1 := strconv.ParseUint(status.Versions.Services, 10, 64)
	slices, err2 := strconv.ParseUint(status.Versions.EndpointSlices, 10, 64)
	return services, slices, status.Failed, errors.Join(err1, err2) == nil
}

// check compares the engine with what the node said before.
func (c *claims) check(t *testing.T) {
	t.Helper()
	services, slices, failed, ok := c.claimed()
	holds := map[string]string{}
	for line := range strings.FieldsSeq(c.holds()) {
		vip, endpoints, _ := strings.Cut(line, "=")
		holds[vip] = endpoints
	}
	for i := 0; ok && i < claimedServices; i++ {
		n := strconv.Itoa(i)
		endpoints, is := holds["10.96.0."+n]
		vip := ""
		if is {
			vip = "10.96.0." + n
		}
		if isFailed(failed, n) {
			continue
		}
		if !c.allows("services"+n, services, vip) || is && !c.allows("endpointslices"+n, slices, endpoints) {
			t.Errorf("the node says that it has Services %d and EndpointSlices %d, but the engine has %v: s%s was %v, its slice %v",
				services, slices, holds, n, c.was["services"+n], c.was["endpointslices"+n])
			return
		}
	}
}

const claimedServices = 5

func claimedPort(n string) changetracker.ServicePortName {
	return changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "test", Name: "s" + n}, Port: "web", Protocol: v1.ProtocolTCP}
}

func isFailed(failed []*proxier.ServiceError, n string) bool {
	return slices.ContainsFunc(failed, func(e *proxier.ServiceError) bool { return e.Name == claimedPort(n) })
}

// change changes one object, the server, or how the engine fails.
func (c *claims) change(t *testing.T) {
	t.Helper()
	c.slow.change(false)
	n := strconv.Itoa(c.random.IntN(claimedServices))
	switch c.random.IntN(20) {
	case 0:
		if c.breaks--; c.breaks == 0 { // seldom: the client waits longer and longer before it tries again
			c.toggle(t, false)
			c.away = true
		}
	case 1:
		if c.breaks--; c.breaks == 0 {
			c.Compact()
		}
	case 2:
		c.engine.Fail(errors.New("the kernel says no"))
	case 3:
		c.engine.Refuse(claimedPort(n), errors.New("no room"))
	case 4, 5:
		c.works()
	case 6, 7, 8:
		c.put(t, "services", n, service("s"+n, "10.96.0."+n), "10.96.0."+n)
	default:
		addr := "10.244.0." + strconv.Itoa(1+c.random.IntN(99))
		c.put(t, "endpointslices", n, slice("s"+n, addr), addr)
	}
}

// awaitAll makes everything work, and waits until the node says that it has all changes.
func (c *claims) awaitAll(t *testing.T) {
	t.Helper()
	c.slow.change(true)
	c.works()
	if c.away {
		c.toggle(t, true)
		c.away = false
	}
	if !poll.Soon(func() bool {
		services, slices, failed, ok := c.claimed()
		return ok && len(failed) == 0 && services >= c.last["services"] && slices >= c.last["endpointslices"]
	}) {
		t.Fatalf("in the end the node says %+v, want at least %v", c.proxier.Status().Families[v1.IPv4Protocol], c.last)
	}
	c.check(t)
}

// slowEngine waits for the next change in every other Apply, so that events come during it.
type slowEngine struct {
	*proxiertest.RecordingEngine

	mu      sync.Mutex // guards all below
	quiet   bool       // no change comes
	changed chan struct{}
}

func newSlowEngine() *slowEngine {
	e := &slowEngine{changed: make(chan struct{})}
	e.change(true)
	return e
}

func (e *slowEngine) wrap(recording *proxiertest.RecordingEngine) proxier.Engine {
	e.RecordingEngine = recording
	return e
}

func (e *slowEngine) Apply(ctx context.Context, u desired.Update) (proxier.Result, error) {
	if len(e.Updates())%2 == 0 {
		select {
		case <-e.next():
		case <-ctx.Done():
		}
	}
	return e.RecordingEngine.Apply(ctx, u)
}

// next returns what is closed when there is no reason to wait.
func (e *slowEngine) next() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.changed
}

// change ends the waiting, and says whether the next Apply may wait.
func (e *slowEngine) change(quiet bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.quiet {
		close(e.changed)
	}
	if e.quiet = quiet; !quiet {
		e.changed = make(chan struct{})
	}
}

// works ends all failures of the engine.
func (c *claims) works() {
	c.engine.Fail(nil)
	for i := range claimedServices {
		c.engine.Refuse(claimedPort(strconv.Itoa(i)), nil)
	}
}

func (c *claims) put(t *testing.T, kind, n string, object runtime.Object, value string) {
	t.Helper()
	before := c.Version()
	if c.random.IntN(3) == 0 {
		c.Delete(t, object)
		value = ""
	} else {
		c.Put(t, object)
	}
	if now := c.Version(); now != before { // else there was nothing to delete
		c.last[kind] = now
		c.was[kind+n] = append(c.was[kind+n], valueAt{now, value})
	}
}

// What a node says to have programmed is in the engine, whatever fails: the engine, single
// service ports, the API server and its history. When all works again, the node says that it
// has everything.
func TestANodeHasWhatItSays(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		first, count := history.Seeds(t, 2)
		for seed := first; seed < first+uint64(count); seed++ {
			t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
				t.Parallel()
				c := &claims{random: rand.New(rand.NewPCG(seed, 22)), was: map[string][]valueAt{}, last: map[string]uint64{}, breaks: 10, slow: newSlowEngine()}
				c.cluster = startClusterWith(t, c.slow.wrap, func(*rest.Config) {}, o, Options{})
				for range 10 {
					for range 40 {
						c.change(t)
						for range c.random.IntN(20) {
							c.check(t)
						}
					}
					c.awaitAll(t)
				}
			})
		}
	})
}
