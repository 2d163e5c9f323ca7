package healthcheck

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/proxier"
)

var (
	web = types.NamespacedName{Namespace: "shop", Name: "web"}
	dns = types.NamespacedName{Namespace: "infra", Name: "dns"}

	everywhere = map[v1.IPFamily][]netip.Prefix{
		v1.IPv4Protocol: {netip.MustParsePrefix("0.0.0.0/0")}, v1.IPv6Protocol: {netip.MustParsePrefix("::/0")},
	}
)

// healthyStatus is that of a healthy proxy.
func healthyStatus() proxier.Status {
	return proxier.Status{Families: families{"IPv4": {Synced: true, LastSuccess: time.Now()}}}
}

// services are health check node ports and numbers of local endpoints.
type services map[types.NamespacedName]struct {
	Port           uint16
	LocalEndpoints int
}

func (s services) update(full bool, ranges []netip.Prefix) proxier.HealthUpdate {
	u := proxier.HealthUpdate{
		Full: full, NodePortAddresses: ranges, Ports: map[types.NamespacedName]uint16{}, LocalEndpoints: map[types.NamespacedName]int{},
	}
	for name, one := range s {
		u.Ports[name], u.LocalEndpoints[name] = one.Port, one.LocalEndpoints
	}
	return u
}

// full is a full update of a family that listens on all addresses.
func full(family v1.IPFamily, s services) proxier.HealthUpdate {
	return s.update(true, everywhere[family])
}

func partial(family v1.IPFamily, s services) proxier.HealthUpdate {
	return s.update(false, everywhere[family])
}

func within(s services, ranges ...string) proxier.HealthUpdate {
	u := s.update(true, nil)
	for _, r := range ranges {
		u.NodePortAddresses = append(u.NodePortAddresses, netip.MustParsePrefix(r))
	}
	return u
}

// bubble is NodePorts on a fake host in a synctest bubble.
type bubble struct {
	*nodePortServer
	*fakeNet
	logs      *observer.ObservedLogs
	addresses atomic.Pointer[[]netip.Addr] // of the host
	listErr   atomic.Pointer[error]        // of reading them
	listed    atomic.Int32
	status    atomic.Pointer[proxier.Status]
	statuses  atomic.Int32
}

func inBubble(t *testing.T, test func(t *testing.T, b *bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{fakeNet: newFakeNet()}
		core, logs := observer.New(zap.InfoLevel)
		b.logs = logs
		healthy := healthyStatus()
		b.status.Store(&healthy)
		b.setAddresses()
		b.nodePortServer = newNodePortServer(NodePortOptions{Logger: zap.New(core), Addresses: b.list, Listen: b.Listen})
		stop := background(t, func(ctx context.Context) error {
			return b.Run(ctx, func() proxier.Status {
				b.statuses.Add(1)
				return *b.status.Load()
			})
		})
		synctest.Wait() // Run has read the addresses once
		test(t, b)
		stop()
		if left := b.open(); len(left) != 0 {
			t.Errorf("open after Run: %v, want none", left)
		}
		if left := b.Conditions(); len(left) != 0 {
			t.Errorf("conditions after Run: %v, want none", left)
		}
	})
}

func (b *bubble) list(context.Context) ([]netip.Addr, error) {
	b.listed.Add(1)
	if err := b.listErr.Load(); err != nil {
		return nil, *err
	}
	return *b.addresses.Load(), nil
}

// setAddresses sets the addresses of the host.
func (b *bubble) setAddresses(addresses ...string) {
	var all []netip.Addr
	for _, a := range addresses {
		all = append(all, netip.MustParseAddr(a))
	}
	b.addresses.Store(&all)
}

func (b *bubble) expectOpen(t *testing.T, rule string, want ...string) {
	t.Helper()
	synctest.Wait()
	slices.Sort(want)
	if got := b.open(); !slices.Equal(got, want) {
		t.Errorf("%s: listens on %q, want %q", rule, got, want)
	}
}

func (b *bubble) expectCode(t *testing.T, rule, key, local string, want int) {
	t.Helper()
	synctest.Wait()
	if code, body := b.ask(t, key, local); code != want {
		t.Errorf("%s: %s at %s answers %d, want %d: %s", rule, key, local, code, want, body)
	}
}

// HC-01 to HC-03 and HC-15: listeners follow the updates.
func TestListenersFollowTheServices(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.expectOpen(t, "before the first sync (HC-15)")
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001, LocalEndpoints: 2}, dns: {Port: 30002}}))
		b.expectOpen(t, "a family by itself", "tcp4 0.0.0.0:30001", "tcp4 0.0.0.0:30002")
		b.Update("IPv6", full("IPv6", services{web: {Port: 30001}}))
		b.expectOpen(t, "one listener for both families", "tcp :30001", "tcp :30002")
		opened := len(b.tried())

		b.Update("IPv4", partial("IPv4", services{web: {Port: 30001}}))
		b.Update("IPv6", partial("IPv6", services{web: {Port: 30001, LocalEndpoints: 7}}))
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001}, dns: {Port: 30002, LocalEndpoints: 1}}))
		b.expectOpen(t, "counts change", "tcp :30001", "tcp :30002")
		if got := len(b.tried()); got != opened {
			t.Errorf("changed counts opened %d listeners, want none", got-opened)
		}
		b.expectCode(t, "counts change", "tcp :30001", "10.0.0.1:30001", 503)
		b.expectCode(t, "counts change", "tcp :30001", "[fd00::1]:30001", 200)

		b.Update("IPv4", partial("IPv4", services{web: {Port: 30003, LocalEndpoints: 1}}))
		b.expectOpen(t, "the last new port", "tcp :30003", "tcp :30002")
		b.Update("IPv6", full("IPv6", services{web: {Port: 30003}}))
		b.expectOpen(t, "the other family follows", "tcp :30003", "tcp :30002")
		b.Update("IPv4", partial("IPv4", services{web: {}}))
		b.expectOpen(t, "a Service that remains in one family", "tcp :30003", "tcp :30002")
		b.Update("IPv6", partial("IPv6", services{web: {}}))
		b.expectOpen(t, "a Service without the port (HC-02)", "tcp :30002")
		b.Update("IPv4", full("IPv4", nil))
		b.expectOpen(t, "full is everything (HC-02)")
	})
}

// Two Services swap their ports: opening waits for closing.
func TestPortsMayBeSwapped(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001, LocalEndpoints: 1}, dns: {Port: 30002}}))
		synctest.Wait()
		b.Update("IPv4", full("IPv4", services{web: {Port: 30002, LocalEndpoints: 1}, dns: {Port: 30001}}))
		b.expectOpen(t, "swapped", "tcp4 0.0.0.0:30001", "tcp4 0.0.0.0:30002")
		b.expectCode(t, "swapped", "tcp4 0.0.0.0:30001", "10.0.0.1:1", 503)
		b.expectCode(t, "swapped", "tcp4 0.0.0.0:30002", "10.0.0.1:1", 200)
		if got := lines(b.logs); len(got) != 0 {
			t.Errorf("log %q, want nothing", got)
		}
	})
}

// Slow clients of the old port do not delay the new one.
func TestAPortIsFreeBeforeItsClientsAre(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001}}))
		synctest.Wait()
		conn, err := b.dial("tcp4 0.0.0.0:30001", "10.0.0.1:30001")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		synctest.Wait()
		b.Update("IPv6", full("IPv6", services{web: {Port: 30001}}))
		b.expectOpen(t, "at once", "tcp :30001")
		b.expectConditions(t, "at once")
	})
}

// HC-14: the address that the client dialled selects the count.
func TestCountsAreByFamily(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001, LocalEndpoints: 1}, dns: {Port: 30002, LocalEndpoints: 1}}))
		b.Update("IPv6", full("IPv6", services{web: {Port: 30001}}))
		b.expectCode(t, "IPv4", "tcp :30001", "10.0.0.1:30001", 200)
		b.expectCode(t, "IPv4 on a socket of both families", "tcp :30001", "[::ffff:10.0.0.1]:30001", 200)
		b.expectCode(t, "IPv6", "tcp :30001", "[fd00::1]:30001", 503)
		b.expectCode(t, "IPv6 with a zone", "tcp :30001", "[fe80::1%eth0]:30001", 503)
		b.expectCode(t, "IPv6 of an IPv4 Service", "tcp :30002", "[fd00::1]:30002", 200)
	})
}

// HC-04 and W-18: listeners follow the node's addresses.
func TestAddressesAreFollowed(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.setAddresses("127.0.0.1", "10.0.0.1", "10.0.0.1", "192.0.2.7", "::1", "fd00::1", "fe80::1", "fe80::2%eth1")
		b.Update("IPv4", within(services{web: {Port: 30001}}, "10.0.0.0/8", "10.1.0.0/16"))
		b.expectOpen(t, "one family", "tcp4 10.0.0.1:30001")
		b.Update("IPv6", within(services{dns: {Port: 30002}}, "fd00::/8", "fe80::/10"))
		b.expectOpen(t, "each Service in both families, link-local addresses with their zone only",
			"tcp4 10.0.0.1:30001", "tcp6 [fd00::1]:30001", "tcp6 [fe80::2%eth1]:30001",
			"tcp4 10.0.0.1:30002", "tcp6 [fd00::1]:30002", "tcp6 [fe80::2%eth1]:30002")
		b.setAddresses("10.0.0.2", "fd00::1")
		time.Sleep(addressPeriod)
		b.expectOpen(t, "10s later", "tcp4 10.0.0.2:30001", "tcp6 [fd00::1]:30001", "tcp4 10.0.0.2:30002", "tcp6 [fd00::1]:30002")
		b.setAddresses("10.0.0.2", "10.0.0.3")
		b.Update("IPv4", within(services{web: {Port: 30001}}, "10.0.0.0/8", "10.1.0.0/16"))
		b.expectOpen(t, "at an Update", "tcp4 10.0.0.2:30001", "tcp4 10.0.0.3:30001", "tcp4 10.0.0.2:30002", "tcp4 10.0.0.3:30002")
		b.Update("IPv4", within(services{web: {Port: 30001}}, "192.0.2.0/24", "0.0.0.0/0"))
		b.expectOpen(t, "all of one family", "tcp4 0.0.0.0:30001", "tcp4 0.0.0.0:30002")
		b.setAddresses("fd00::1")
		b.Update("IPv6", within(services{dns: {Port: 30002}}))
		b.expectOpen(t, "no node ports in the other family", "tcp4 0.0.0.0:30001", "tcp4 0.0.0.0:30002")
		b.expectConditions(t, "as configured")
		b.Update("IPv6", full("IPv6", services{dns: {Port: 30002}}))
		b.expectOpen(t, "all of both", "tcp :30001", "tcp :30002")
	})
}

func TestAddressesAreAskedForOnlyIfTheyMatter(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001}}))
		b.Update("IPv6", within(services{web: {Port: 30001}}))
		time.Sleep(time.Minute - time.Second)
		if got := b.listed.Load(); got != 0 {
			t.Errorf("addresses listed %d times, want never", got)
		}
		b.Update("IPv6", within(nil, "fd00::/8"))
		time.Sleep(time.Minute)
		if got := b.listed.Load(); got != 7 {
			t.Errorf("addresses listed %d times in a minute, want 7", got)
		}
	})
}

// expectConditions expects one condition per text, with all parts of the text.
func (b *bubble) expectConditions(t *testing.T, rule string, want ...string) []proxier.Condition {
	t.Helper()
	synctest.Wait()
	got := b.Conditions()
	ok := len(got) == len(want)
	for i, c := range got {
		if !ok {
			break
		}
		ok = c.Type == proxier.ConditionHealthCheckPort && !c.Since.IsZero()
		for word := range strings.SplitSeq(want[i], "|") {
			ok = ok && strings.Contains(string(c.Family)+" "+c.Message, word)
		}
	}
	if !ok {
		t.Errorf("%s: conditions %+v, want %q", rule, got, want)
	}
	return got
}

// W-18, W-31: the lack of an address is reported.
func TestNoMatchingAddressIsACondition(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.setAddresses("10.0.0.1")
		b.Update("IPv6", within(nil, "fd00::/8"))
		b.expectConditions(t, "without Services nothing is missing")
		b.Update("IPv6", within(services{web: {Port: 30001}}, "fd00::/8", "2001:db8::/32"))
		first := b.expectConditions(t, "no address", "IPv6|1 Services|fd00::/8, 2001:db8::/32")
		time.Sleep(time.Hour)
		later := b.expectConditions(t, "still no address", "IPv6|1 Services")
		if !later[0].Since.Equal(first[0].Since) {
			t.Errorf("since %v, want as at first: %v", later[0].Since, first[0].Since)
		}
		if got := lines(b.logs); len(got) != 1 {
			t.Errorf("log %q, want one line (W-38)", got)
		}
		b.setAddresses("fd00::1")
		time.Sleep(addressPeriod)
		b.expectConditions(t, "an address was added")
		b.expectOpen(t, "an address was added", "tcp6 [fd00::1]:30001")
	})
}

// HC-04: kube-proxy listens on all addresses then, which may be too many.
func TestUnknownAddressesKeepWhatListens(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		boom := errors.New("netlink is closed")
		b.setAddresses("10.0.0.1")
		b.Update("IPv4", within(services{web: {Port: 30001}}, "10.0.0.0/8"))
		synctest.Wait()
		b.listErr.Store(&boom)
		b.Update("IPv4", within(services{web: {Port: 30001}, dns: {Port: 30002}}, "10.0.0.0/8"))
		b.expectOpen(t, "addresses unknown", "tcp4 10.0.0.1:30001", "tcp4 10.0.0.1:30002")
		b.expectConditions(t, "addresses unknown", "netlink is closed")
		time.Sleep(time.Minute)
		if got := lines(b.logs); len(got) != 1 {
			t.Errorf("log %q, want one line (W-38)", got)
		}
		b.listErr.Store(nil)
		time.Sleep(addressPeriod)
		b.expectConditions(t, "addresses known")
	})
}

// HC-06 and W-38: a port that is in use does not affect others, is retried with backoff, is
// logged once, and is a condition until it works.
func TestABusyPortIsACondition(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		busy := "tcp4 10.0.0.2:30001"
		b.set(busy, syscall.EADDRINUSE)
		b.setAddresses("10.0.0.1", "10.0.0.2")
		began := time.Now()
		b.Update("IPv4", within(services{web: {Port: 30001, LocalEndpoints: 1}, dns: {Port: 30002}}, "10.0.0.0/8"))
		b.expectOpen(t, "one is busy", "tcp4 10.0.0.1:30001", "tcp4 10.0.0.1:30002", "tcp4 10.0.0.2:30002")
		b.expectCode(t, "the other address of the Service", "tcp4 10.0.0.1:30001", "10.0.0.1:30001", 200)
		attempts := len(b.tried())
		time.Sleep(100 * time.Second)
		got := b.expectConditions(t, "one is busy", "IPv4|shop/web|10.0.0.2:30001|address already in use|healthCheckNodePort")
		if !got[0].Since.Equal(began) {
			t.Errorf("since %v, want %v", got[0].Since, began)
		}
		var pauses []time.Duration
		for _, at := range b.tried()[attempts:] {
			pauses = append(pauses, at.Sub(began)/time.Second)
		}
		if want := []time.Duration{1, 3, 7, 15, 31, 61, 91}; !slices.Equal(pauses, want) {
			t.Errorf("tried again after %v s, want %v", pauses, want)
		}
		b.set(busy, nil)
		time.Sleep(longestRetry)
		b.expectConditions(t, "it is free")
		b.expectCode(t, "it is free", busy, "10.0.0.2:30001", 200)
		if got := lines(b.logs); len(got) != 2 || !strings.HasPrefix(got[0], "warn") || !strings.HasPrefix(got[1], "info") {
			t.Errorf("log %q, want one line when it fails and one when it works", got)
		}
	})
}

// Two Services cannot have the same port; the API server ensures that, but not at once.
func TestAPortThatTwoServicesClaim(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{dns: {Port: 30001}, web: {Port: 30001, LocalEndpoints: 1}}))
		b.expectOpen(t, "used twice", "tcp4 0.0.0.0:30001")
		synctest.Wait()
		conditions := b.Conditions()
		if len(conditions) != 1 {
			t.Fatalf("conditions %v, want one", conditions)
		}
		b.Update("IPv4", partial("IPv4", services{dns: {}}))
		time.Sleep(time.Minute)
		b.Update("IPv4", partial("IPv4", services{web: {Port: 30001, LocalEndpoints: 1}}))
		b.expectConditions(t, "used once")
		b.expectCode(t, "used once", "tcp4 0.0.0.0:30001", "10.0.0.1:1", 200)
	})
}

func TestAdviceDependsOnTheCause(t *testing.T) {
	for cause, want := range map[error]string{
		syscall.EADDRINUSE: "another healthCheckNodePort", syscall.EADDRNOTAVAIL: "still has the address",
		syscall.EMFILE: "open files", syscall.ENFILE: "open files", syscall.EACCES: "permit this program",
	} {
		if got := advice(fmt.Errorf("open listener: %w", cause)); !strings.Contains(got, want) {
			t.Errorf("%v: advice %q, want %q in it", cause, got, want)
		}
	}
}

// W-22: a temporary lack of file descriptors does not close a listener.
func TestAllListenersSurviveALackOfDescriptors(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.setAddresses("10.0.0.1", "10.0.0.2", "10.0.0.3")
		b.Update("IPv4", within(services{web: {Port: 30001, LocalEndpoints: 1}, dns: {Port: 30002, LocalEndpoints: 1}}, "10.0.0.0/8"))
		synctest.Wait()
		keys, opened := b.open(), len(b.tried())
		b.failAccept(syscall.EMFILE)
		codes := make(chan int)
		for _, key := range keys {
			go func() {
				code, _ := b.ask(t, key, "10.0.0.1:1")
				codes <- code
			}()
		}
		time.Sleep(5 * time.Second)
		if got := len(b.Conditions()); got != len(keys) {
			t.Errorf("%d conditions, want one for each of %d listeners", got, len(keys))
		}
		b.failAccept(nil)
		for range keys {
			if code := <-codes; code != 200 {
				t.Errorf("answer %d afterwards, want 200", code)
			}
		}
		b.expectConditions(t, "afterwards")
		if got := len(b.tried()); got != opened {
			t.Errorf("opened %d more listeners, want none", got-opened)
		}
		if got := len(b.logs.All()); got != 2*len(keys) {
			t.Errorf("%d lines for %d listeners, want two each (W-38): %v", got, len(keys), b.logs.All())
		}
	})
}

// W-22: a listener that was closed by another goroutine is replaced.
func TestADeadNodePortIsReplaced(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001, LocalEndpoints: 1}}))
		synctest.Wait()
		b.kill("tcp4 0.0.0.0:30001")
		b.expectConditions(t, "dead", "shop/web|use of closed network connection")
		time.Sleep(firstRetry)
		b.expectCode(t, "replaced", "tcp4 0.0.0.0:30001", "10.0.0.1:1", 200)
		b.expectConditions(t, "replaced")
	})
}

// HC-08, HC-11: the health of the proxy matters, that of the node does not.
func TestAnUnhealthyProxyAnswers503(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001, LocalEndpoints: 3}}))
		key := "tcp4 0.0.0.0:30001"
		draining := healthyStatus()
		draining.Node.Draining = "it is being deleted"
		b.setStatus(draining)
		b.expectCode(t, "a draining node (HC-11)", key, "10.0.0.1:1", 200)
		b.setStatus(proxier.Status{Families: families{"IPv4": {}}})
		b.expectCode(t, "a proxy that has not programmed", key, "10.0.0.1:1", 503)
		b.setStatus(proxier.Status{Families: families{"IPv4": {Synced: true, StaleSince: time.Now().Add(-time.Minute)}}})
		b.expectCode(t, "a proxy that is late", key, "10.0.0.1:1", 503)
		b.setStatus(healthyStatus())
		b.expectCode(t, "a healthy proxy", key, "10.0.0.1:1", 200)
	})
}

// setStatus replaces the status, and waits until the cached health has expired.
func (b *bubble) setStatus(s proxier.Status) {
	b.status.Store(&s)
	time.Sleep(healthTTL)
}

func TestManyProbesShareAStatus(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bubble) {
		b.Update("IPv4", full("IPv4", services{web: {Port: 30001, LocalEndpoints: 1}}))
		synctest.Wait()
		for range 100 {
			b.ask(t, "tcp4 0.0.0.0:30001", "10.0.0.1:1")
			time.Sleep(healthTTL / 50)
		}
		if got := b.statuses.Load(); got != 2 {
			t.Errorf("%d statuses for 100 probes in %v, want 2", got, 2*healthTTL)
		}
	})
}

func TestNodePortsRunOnce(t *testing.T) {
	n := newNodePortServer(NodePortOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Run(ctx, nil); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	if err := n.Run(ctx, nil); err == nil {
		t.Error("a second Run returns nil, want an error")
	}
}

// Update copies its argument, which the caller may change.
func TestUpdateKeepsNothingOfItsArgument(t *testing.T) {
	n := newNodePortServer(NodePortOptions{})
	u := within(services{web: {Port: 30001, LocalEndpoints: 1}}, "10.0.0.0/8")
	n.Update("IPv4", u)
	before := n.ports.keys([]netip.Addr{netip.MustParseAddr("10.0.0.1")})
	clear(u.Ports)
	clear(u.LocalEndpoints)
	u.NodePortAddresses[0] = netip.MustParsePrefix("192.0.2.0/24")
	if after := n.ports.keys([]netip.Addr{netip.MustParseAddr("10.0.0.1")}); !maps.Equal(before, after) || len(after) != 1 {
		t.Errorf("sites %v, want %v", after, before)
	}
}

func TestInterfaceAddressesAreFound(t *testing.T) {
	got, err := interfaceAddresses(t.Context())
	if loopback := netip.MustParseAddr("127.0.0.1"); err != nil || !slices.Contains(got, loopback) {
		t.Errorf("addresses %v, error %v, want %v among them", got, err, loopback)
	}
}
