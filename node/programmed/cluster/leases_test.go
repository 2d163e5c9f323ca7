package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	coordination "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var web = types.NamespacedName{Namespace: "shop", Name: "web"}

// node has a status that changes.
type node struct {
	version atomic.Int64
	failed  atomic.Int64 // how many service ports fail
	calls   atomic.Int64
	sends   atomic.Pointer[netip.AddrPort] // to an endpoint that is not ready
}

func (n *node) Sends(...netip.AddrPort) (all []proxier.Sending) {
	to := n.sends.Load()
	if to == nil {
		return nil
	}
	is := proxier.Sending{Endpoint: *to, Service: changetracker.ServicePortName{NamespacedName: web}, Frontends: []desired.Key{{Port: 30080, Protocol: desired.TCP}}}
	for range 1 + n.failed.Load() { // as often as Services fail
		all = append(all, is)
		is.Frontends, is.Reason = slices.Repeat(is.Frontends[:1], 10), strings.Repeat("y", 500)
	}
	return all
}

func (n *node) Status() proxier.Status {
	n.calls.Add(1)
	f := proxier.FamilyStatus{Synced: true, Versions: changetracker.Versions{Services: "1", EndpointSlices: strconv.FormatInt(n.version.Load(), 10)}}
	for i := range n.failed.Load() {
		name := types.NamespacedName{Namespace: "shop", Name: "failing-" + strconv.FormatInt(i, 10)}
		f.Failed = append(f.Failed, &proxier.ServiceError{Name: changetracker.ServicePortName{NamespacedName: name}, Err: errors.New(strings.Repeat("x", 500))})
	}
	return proxier.Status{Families: map[v1.IPFamily]proxier.FamilyStatus{v1.IPv4Protocol: f, v1.IPv6Protocol: f}}
}

// startAPI returns a server with the switch and some Nodes, and a client.
func startAPI(t *testing.T, nodes int) (*apitest.Server, *Client) {
	t.Helper()
	api := apitest.New(t, apitest.Options{Resources: []apitest.Resource{{GroupVersionKind: coordination.SchemeGroupVersion.WithKind("Lease"), Name: "leases"}}})
	lease := &coordination.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: LeaseNamespace, Name: SwitchName, Annotations: map[string]string{"example.com/team": "network"}}}
	lease.SetGroupVersionKind(coordination.SchemeGroupVersion.WithKind("Lease"))
	api.Put(t, lease)
	for i := range nodes {
		api.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-" + strconv.Itoa(i+1), UID: types.UID(fmt.Sprint("uid-", i+1))}})
	}
	c, err := New(&rest.Config{Host: api.URL(), QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	return api, c
}

// publish publishes for a node until the test ends.
func publish(t *testing.T, c *Client, name string, n *node) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.Publish(ctx, PublishOptions{Node: name, Proxy: n}); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { stop(); running.Wait(); c.core.Client.CloseIdleConnections() })
}

func watches(api *apitest.Server) (n int) {
	for _, r := range api.Requests() {
		if strings.HasPrefix(r, "WATCH leases") && strings.Contains(r, "fieldSelector=metadata.name="+SwitchName) {
			n++
		}
	}
	return n
}

// Nodes that cannot be dialled are waited for through their Leases. Before that, they write
// nothing, and nobody asks their proxies.
func TestLeases(t *testing.T) {
	t.Parallel()
	api, c := startAPI(t, 2)
	nodes := []*node{{}, {}}
	for i, n := range nodes {
		n.version.Store(5)
		publish(t, c, "node-"+strconv.Itoa(i+1), n)
	}
	poll.Until(t, "the nodes watch", func() bool { return watches(api) == 2 })
	before := api.Version()
	for i, n := range nodes {
		if n.version.Store(6); n.calls.Load() != 0 {
			t.Errorf("node %d was asked although nobody waits", i+1)
		}
	}
	if api.Version() != before {
		t.Error("something was written although nobody waits")
	}
	w, stop, err := c.Leased(t.Context(), LeaseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	change := func(version string) programmed.ServiceChange {
		return programmed.ServiceChange{Service: web, Versions: changetracker.Versions{EndpointSlices: version}}
	}
	if err := programmed.Wait(t.Context(), w, change("6")); err != nil {
		t.Errorf("Wait = %v, want no error", err)
	}
	nodes[0].version.Store(8)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- programmed.Wait(ctx, w, change("8")) }()
	poll.Until(t, "the Lease of node 1", func() bool {
		report, err := w.Ask(t.Context(), "node-1", programmed.ServiceChange{Service: web})
		return err == nil && report.Families[v1.IPv4Protocol].EndpointSlices == "8"
	})
	cancel()
	err = <-ended
	if behind, ok := errors.AsType[*programmed.BehindError](err); !ok || behind.Nodes["node-2"] == nil || !strings.Contains(behind.Nodes["node-2"].Error(), "are those of version 6, want 8") {
		t.Errorf("Wait = %v, want node-2 behind", err)
	}
	nodes[1].failed.Store(100) // more than a Lease lists
	nodes[1].version.Store(8)
	poll.Until(t, "that node 2 fails", func() bool {
		report, err := w.Ask(t.Context(), "node-2", programmed.ServiceChange{Service: web})
		return err == nil && report.Families[v1.IPv4Protocol].Unlisted == 100-mostListed && strings.Contains(fmt.Sprint(report.Missing(change("8"))), "68 service ports fail that the report does not list")
	})
	var l coordination.Lease
	if err := c.leases.Get().Namespace(LeaseNamespace).Resource("leases").Name(leasePrefix + "node-2").Do(t.Context()).Into(&l); err != nil {
		t.Fatal(err)
	}
	if len(l.OwnerReferences) != 1 || l.OwnerReferences[0].UID != "uid-2" || l.Labels[LeaseLabel] != "node" {
		t.Errorf("the Lease is %+v, want one of Node node-2", l.ObjectMeta)
	}
	if err := c.leases.Get().Namespace(LeaseNamespace).Resource("leases").Name(SwitchName).Do(t.Context()).Into(&l); err != nil || l.Annotations["example.com/team"] != "network" || l.Annotations[intervalAnnotation] == "" {
		t.Errorf("the switch has annotations %v, %v, want those of others, too", l.Annotations, err)
	}
	if _, err := w.Ask(t.Context(), "node-9", programmed.ServiceChange{Service: web}); err == nil || !strings.Contains(err.Error(), "has written no Lease yet") {
		t.Errorf("a node without a Lease: %v", err)
	}
}

// A Lease has the endpoints to which a node sends although they end: who waits for one of these waits on.
func TestLeasesSayWhereNodesSend(t *testing.T) {
	t.Parallel()
	api, c := startAPI(t, 1)
	pod, n := netip.MustParseAddrPort("10.244.0.1:8080"), &node{}
	n.version.Store(6)
	n.sends.Store(&pod)
	publish(t, c, "node-1", n)
	poll.Until(t, "the node watches", func() bool { return watches(api) == 1 })
	w, stop, err := c.Leased(t.Context(), LeaseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	change := programmed.ServiceChange{Service: web, Versions: changetracker.Versions{EndpointSlices: "6"}}
	if err := programmed.Wait(t.Context(), w, change); err != nil {
		t.Errorf("Wait = %v without an endpoint, want no error", err)
	}
	change.Left = []netip.AddrPort{pod}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := programmed.Wait(ctx, w, change); err == nil || !strings.Contains(err.Error(), "node node-1: IPv4: it still sends to 10.244.0.1:8080") {
		t.Errorf("Wait = %v, want that the node sends to the endpoint", err)
	}
	ended := make(chan error)
	go func() { ended <- programmed.Wait(t.Context(), w, change) }()
	n.sends.Store(nil)
	if err := <-ended; err != nil {
		t.Errorf("Wait = %v, want no error", err)
	}
}

// TestLeasesOfNodesThatAreBehindAList: no Lease says whether a node that is behind has a pod that no list has any more.
func TestLeasesOfNodesThatAreBehindAList(t *testing.T) {
	t.Parallel()
	api, c := startAPI(t, 1)
	n := &node{}
	n.version.Store(6)
	publish(t, c, "node-1", n)
	poll.Until(t, "the node watches", func() bool { return watches(api) == 1 })
	w, stop, err := c.Leased(t.Context(), LeaseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	change := programmed.ServiceChange{Versions: changetracker.Versions{EndpointSlices: "5"}, Left: []netip.AddrPort{netip.MustParseAddrPort("10.244.0.1:0")}, Listed: "7"}
	poll.Until(t, "a Lease", func() bool { _, err := w.Ask(t.Context(), "node-1", change); return err == nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := programmed.Wait(ctx, w, change); err == nil || !strings.Contains(err.Error(), "it may not know yet that 10.244.0.1:0 is gone: EndpointSlices are those of version 6, want 7") {
		t.Errorf("Wait = %v, want that the node is behind the list", err)
	}
	n.version.Store(8)
	if err := programmed.Wait(t.Context(), w, change); err != nil {
		t.Errorf("Wait = %v, want no error", err)
	}
}

// Without the rights, the error of the wait says so.
func TestLeasesAreForbidden(t *testing.T) {
	api := apitest.New(t, apitest.Options{Hidden: []string{"leases"}})
	api.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
	c, err := New(&rest.Config{Host: api.URL(), QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.core.Client.CloseIdleConnections)
	w, stop, err := c.Leased(t.Context(), LeaseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	poll.Until(t, "the reason", func() bool {
		_, err := w.Ask(t.Context(), "node-1", programmed.ServiceChange{Service: web})
		return strings.Contains(err.Error(), "Lease")
	})
}

// On a fake clock: a node writes at most once in the interval and only what is new, while somebody
// waits, and nothing any more soon after the last waiter has died.
func TestANodeWritesOnlyWhileSomebodyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{}
		var mu sync.Mutex
		var writes []time.Time
		p := &publisher{options: PublishOptions{Node: "n", Proxy: n}, wanted: make(chan time.Duration, 1)}
		p.save = func(context.Context, string) error {
			mu.Lock()
			defer mu.Unlock()
			writes = append(writes, time.Now())
			return nil
		}
		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { p.write(ctx) })
		renew := func(version int) {
			p.renewed(&coordination.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(version), Annotations: map[string]string{intervalAnnotation: "2s"}}})
		}
		pass := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				n.version.Add(1)
			}
			synctest.Wait()
		}
		renew(1) // it may be old
		pass(time.Hour)
		if n.calls.Load() != 0 || len(writes) != 0 {
			t.Errorf("%d calls and %d writes although nobody waits", n.calls.Load(), len(writes))
		}
		for i := range 12 { // a minute
			renew(2 + i)
			pass(renewEvery)
		}
		if len(writes) < 28 || len(writes) > 31 {
			t.Errorf("%d writes in a minute, want one every two seconds", len(writes))
		}
		for i := 1; i < len(writes); i++ {
			if d := writes[i].Sub(writes[i-1]); d < 2*time.Second {
				t.Errorf("writes after %v, want 2s or more", d)
			}
		}
		pass(waitingFor)
		calls, written := n.calls.Load(), len(writes)
		pass(time.Hour)
		if n.calls.Load() != calls || len(writes) != written {
			t.Errorf("%d calls and %d writes long after the last waiter", n.calls.Load()-calls, len(writes)-written)
		}
		for i := range 12 { // nothing is new
			renew(100 + i)
			time.Sleep(renewEvery)
		}
		synctest.Wait()
		if len(writes) != written+1 {
			t.Errorf("%d writes without any change, want one", len(writes)-written)
		}
		stop()
		running.Wait()
	})
}

// What a process before has said does not count: the next one clears its report, also while nobody
// waits, and writes no other then.
func TestANodeClearsWhatItSaidBefore(t *testing.T) {
	api, c := startAPI(t, 1)
	p := &publisher{client: c, options: PublishOptions{Node: "node-1", Namespace: LeaseNamespace}}
	old, err := json.Marshal(programmed.NodeReport{Node: "node-1", Families: map[v1.IPFamily]programmed.Family{v1.IPv4Protocol: {EndpointSlices: "900"}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.put(t.Context(), string(old)); err != nil {
		t.Fatal(err)
	}
	lease := func() (l coordination.Lease) {
		if err := c.leases.Get().Namespace(LeaseNamespace).Resource("leases").Name(leasePrefix + "node-1").Do(t.Context()).Into(&l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	if l := lease(); l.Annotations[ReportAnnotation] != string(old) {
		t.Fatalf("the Lease has %q, want %q", l.Annotations[ReportAnnotation], old)
	}
	n := &node{}
	n.version.Store(5)
	publish(t, c, "node-1", n)
	poll.Until(t, "the node has cleared its Lease", func() bool { _, has := lease().Annotations[ReportAnnotation]; return !has })
	poll.Until(t, "the node watches", func() bool { return watches(api) == 1 })
	if n.calls.Load() != 0 {
		t.Error("the node was asked although nobody waits")
	}
	w, stop, err := c.Leased(t.Context(), LeaseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	poll.Until(t, "the new report", func() bool {
		report, err := w.Ask(t.Context(), "node-1", programmed.ServiceChange{Service: web})
		return err == nil && report.Node == "node-1"
	})
	report, err := w.Ask(t.Context(), "node-1", programmed.ServiceChange{Service: web})
	if has := report.Families[v1.IPv4Protocol].EndpointSlices; err != nil || has != "5" {
		t.Errorf("the node says %q, %v, want 5", has, err)
	}
}

// The arithmetic of docs/PROGRAMMED.md.
func TestWritesOfLargeClusters(t *testing.T) {
	for nodes, want := range map[int]time.Duration{1: time.Second, 500: time.Second, 5000: 10 * time.Second, 65000: 130 * time.Second} {
		if got := intervalFor(nodes); got != want {
			t.Errorf("%d nodes write every %v, want %v", nodes, got, want)
		}
	}
	for interval, want := range map[time.Duration]time.Duration{time.Second: 5 * time.Second, 10 * time.Second: 5 * time.Second, 130 * time.Second: 65 * time.Second} {
		if got := renewPause(interval); got != want || 3*got/2 >= max(waitingFor, 2*interval) {
			t.Errorf("with an interval of %v, the switch is renewed every %v, want %v", interval, got, want)
		}
	}
	n := &node{}
	n.version.Store(1234567890)
	p := &publisher{options: PublishOptions{Node: strings.Repeat("n", 40), Proxy: n}}
	few := len(p.report())
	n.failed.Store(1000)
	many := len(p.report())
	pod := netip.MustParseAddrPort("10.244.100.100:18080")
	n.sends.Store(&pod)
	most := len(p.report())
	t.Logf("the report has %d bytes, with most failures %d, with most endpoints of one family too %d; an event of the switch %d", few, many, most, switchEvent(t))
	if few > 300 || many > 25000 || most > 36000 {
		t.Errorf("the report has %d bytes, with most failures %d, with most endpoints too %d, want 300, 25000 and 36000 at most", few, many, most)
	}
}

// switchEvent returns how many bytes each node reads when the switch is renewed.
func switchEvent(t *testing.T) int {
	t.Helper()
	now := metav1.NowMicro()
	l := coordination.Lease{
		TypeMeta: metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: LeaseNamespace, Name: SwitchName, UID: types.UID(strings.Repeat("u", 36)), ResourceVersion: "1234567890", CreationTimestamp: metav1.Now(),
			Annotations: map[string]string{intervalAnnotation: "10s"},
			// Of the program that applied the manifest, and of the last waiter.
			ManagedFields: []metav1.ManagedFieldsEntry{
				{Manager: "kubectl-client-side-apply", Operation: "Update", APIVersion: "coordination.k8s.io/v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{}}}`)},
				{Manager: "prestop", Operation: "Update", APIVersion: "coordination.k8s.io/v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:` + intervalAnnotation + `":{}}},"f:spec":{"f:renewTime":{}}}`)},
			},
		},
		Spec: coordination.LeaseSpec{RenewTime: &now},
	}
	event, err := l.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return len(event)
}
