package ipvs

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestTheSchedulerIsExplained: Explain names the scheduler of the virtual server, also one that
// the settings of a service port choose against its policy.
func TestTheSchedulerIsExplained(t *testing.T) {
	t.Parallel()
	least, source, port := changetracker.LeastConnections, changetracker.SourceHash, changetracker.SourcePortHash
	for title, c := range map[string]struct {
		config  Config
		own     Tuning
		policy  changetracker.Balancing
		weights []uint16
		want    string
		like    changetracker.Balancing
		reason  string
	}{
		"defaults":               {want: "rr"},
		"weights":                {weights: []uint16{1, 2}, want: "wrr", reason: "load balancing policy random, in proportion to the weights"},
		"config":                 {config: Config{Scheduler: "lc"}, want: "lc", like: least, reason: "choose the scheduler lc instead"},
		"config, but a policy":   {config: Config{Scheduler: "lc"}, policy: port, want: "mh", like: port, reason: "policy source-port-hash"},
		"tuned":                  {own: Tuning{Scheduler: "sed"}, policy: source, want: "sed", like: least, reason: "policy source-hash: the settings of the engine choose the scheduler sed instead"},
		"tuned, like the policy": {own: Tuning{Scheduler: "sh"}, policy: source, want: "sh", like: source, reason: "policy source-hash"},
		"tuned flag":             {own: Tuning{HashPort: true}, policy: source, want: "mh", like: port, reason: "choose the scheduler mh instead"},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			config := c.config.WithDefaults()
			config.Choose = func(*desired.Service) Tuning { return c.own }
			e := &engine{config: config}
			tracker, err := changetracker.New(changetracker.Options{Families: []v1.IPFamily{v1.IPv4Protocol}})
			if err != nil {
				t.Fatal(err)
			}
			name := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "a", Name: "web"}, Protocol: v1.ProtocolTCP}
			vip := netip.MustParseAddrPort("198.51.100.1:80")
			endpoints := []changetracker.Endpoint{{Addr: endpointA(), Ready: true, Serving: true}, {Addr: endpointB(), Ready: true, Serving: true}}
			for i, weight := range c.weights {
				endpoints[i].Weight = weight
			}
			_, err = tracker.Services.Set(name.NamespacedName, changetracker.ServicePort{Name: name, ClusterIP: vip.Addr(), Port: vip.Port(), Balancing: c.policy})
			if _, setErr := tracker.Endpoints.Set(name, endpoints...); err != nil || setErr != nil {
				t.Fatal(err, setErr)
			}
			var got desired.Explanation
			_ = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
				packet := desired.Packet{Protocol: desired.TCP, Source: netip.MustParseAddr("192.0.2.1"), Destination: vip, Origin: desired.FromOutside}
				got, err = desired.NewResolved(delta.After, desired.Resolver{}, desired.Globals{}).Explain(packet, nil, e.Traits)
				return nil, nil
			})
			if err != nil || got.Scheduler != c.want || got.Balancing != c.like || !strings.Contains(strings.Join(got.Reasons, "; "), c.reason) {
				t.Errorf("%v, scheduler %s, %v, %q, %v; want %s, %v and %q", got.Verdict, got.Scheduler, got.Balancing, got.Reasons, err, c.want, c.like, c.reason)
			}
			if e.Traits(nil).Scheduler != "" {
				t.Error("there is a scheduler without a service port")
			}
		})
	}
}

// An unknown scheduler concerns one service port: the service port has the config's scheduler meanwhile, also after
// changes and a restart, and is retried. If the config's scheduler is unknown, there is no virtual server.
func TestAnUnknownSchedulerConcernsOneServicePort(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	n.kernel.missing["mh"] = &proxier.UnsupportedError{Feature: "IPVS scheduler mh", Err: unix.ENOENT}
	e := n.engine(t)
	hashed := func(endpoints ...string) *desired.Service {
		s := service("web", webVIP, endpoints...)
		s.Port = &changetracker.ServicePort{Balancing: changetracker.SourceHash}
		return s
	}
	refuses := func(u desired.Update) {
		t.Helper()
		result, err := e.Apply(t.Context(), u)
		failed := result.Failed
		if err != nil || len(failed) != 1 || failed[0].Name != portName("web") || !errors.Is(failed[0], proxier.ErrNotSupported) {
			t.Fatalf("Apply = %v, %v, want that web failed by ErrNotSupported", failed, err)
		}
	}
	has := func(scheduler, pod string) {
		t.Helper()
		n.mustHold(t, dnsVIP+":80/TCP="+pod2+"*1", webVIP+":80/TCP="+pod+"*1")
		if got := n.kernel.virtuals[tcpKey(webVIP+":80")].scheduler; got != scheduler {
			t.Errorf("scheduler = %s, want %s", got, scheduler)
		}
	}
	dns := service("dns", dnsVIP, pod2)
	refuses(full(hashed(pod1), dns))
	has("rr", pod1)
	refuses(partial(hashed(pod3)))
	deleteDrainedAfter(e, 0)
	has("rr", pod3)
	e = n.engine(t)
	refuses(full(hashed(pod3), dns))
	has("rr", pod3)
	delete(n.kernel.missing, "mh") // the module is loaded now
	mustApply(t, e, partial(hashed(pod3)))
	has("mh", pod3)
	n = newFakeNode()
	n.kernel.missing["lc"] = &proxier.UnsupportedError{Feature: "IPVS scheduler lc", Err: unix.ENOENT}
	e = n.engine(t, func(c *Config) { c.Scheduler = "lc" })
	refuses(full(service("web", webVIP, pod1)))
	n.mustHold(t)
}

// TestAPolicyChangesInPlace: each change is one write to the virtual server, and none to its
// real servers, except their weights. While the scheduler changes the rules drop what is new.
// The weighted form of a scheduler stays.
func TestAPolicyChangesInPlace(t *testing.T) {
	t.Parallel()
	n := newFakeNode()
	e := n.engine(t)
	mustApply(t, e, full(service("web", webVIP, pod1, pod2)))
	put, weight := "put 198.51.100.1:80/TCP", "put real 198.51.100.1:80/TCP -> "+pod2+" weight "
	for _, step := range []struct {
		what      string
		policy    changetracker.Balancing
		weight    uint16 // of the second endpoint
		scheduler string
		flags     uint32
		want      []string
	}{
		{"hashed", changetracker.SourceHash, 1, "mh", 0x8, []string{put}},
		{"hashed with ports", changetracker.SourcePortHash, 1, "mh", 0x18, []string{put}},
		{"hashed with weights", changetracker.SourcePortHash, 7, "mh", 0x18, []string{weight + "7"}},
		{"least connections", changetracker.LeastConnections, 7, "wlc", 0, []string{put}},
		{"other weights", changetracker.LeastConnections, 5, "wlc", 0, []string{weight + "5"}},
		{"equal weights", changetracker.LeastConnections, 1, "wlc", 0, []string{weight + "1"}},
		{"drawn", changetracker.Random, 1, "rr", 0, []string{put}},
		{"drawn with weights", changetracker.Random, 2, "wrr", 0, []string{put, weight + "2"}},
		{"equal weights again", changetracker.Random, 1, "wrr", 0, []string{weight + "1"}},
	} {
		s := service("web", webVIP, pod1, pod2)
		s.Port = &changetracker.ServicePort{Balancing: step.policy}
		if step.weight > 1 {
			s.ClusterWeights = []uint16{1, step.weight}
		}
		n.record()
		reschedules := step.want[0] == put && step.what != "hashed with ports"
		write, action := n.kernel.onWrite, func() desired.Action { return n.rules.services[s.Name].Frontends[0].Action }
		n.kernel.onWrite = func(verb string, key serverKey, real netip.AddrPort, weight int) {
			if held := action() == desired.Drop; verb == "put" && held != reschedules {
				t.Errorf("%s: the rules drop new connections: %t, want %t", step.what, held, reschedules)
			}
			write(verb, key, real, weight)
		}
		mustApply(t, e, partial(s))
		want := append([]string{"rules"}, step.want...)
		if reschedules {
			want = slices.Concat([]string{"rules", "waitForPackets"}, step.want, []string{"rules"})
		}
		if got := action(); got != desired.Forward {
			t.Errorf("%s: afterwards the rules have action %v, want Forward", step.what, got)
		}
		n.mustSee(t, want...)
		if got := n.kernel.virtuals[tcpKey(webVIP+":80")].settings; got != (settings{scheduler: step.scheduler, flags: step.flags}) {
			t.Errorf("%s: settings = %+v, want %s with flags %#x", step.what, got, step.scheduler, step.flags)
		}
		e = n.engine(t) // the next process finds all of it
		n.record()
		mustApply(t, e, full(s))
		n.mustSee(t, "rules")
	}
}
