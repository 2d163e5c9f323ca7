package ipvs

import (
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
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
		want    desired.Scheduler
		reason  string
	}{
		"defaults":               {want: desired.Scheduler{Name: "rr"}},
		"weights":                {weights: []uint16{1, 2}, want: desired.Scheduler{Name: "wrr"}, reason: "load balancing policy random, in proportion to the weights"},
		"config":                 {config: Config{Scheduler: "lc"}, want: desired.Scheduler{Name: "lc", Balancing: least}, reason: "choose the scheduler lc instead"},
		"config, but a policy":   {config: Config{Scheduler: "lc"}, policy: port, want: desired.Scheduler{Name: "mh", Balancing: port}, reason: "policy source-port-hash"},
		"tuned":                  {own: Tuning{Scheduler: "sed"}, policy: source, want: desired.Scheduler{Name: "sed", Balancing: least}, reason: "policy source-hash: the settings of the engine choose the scheduler sed instead"},
		"tuned, like the policy": {own: Tuning{Scheduler: "sh"}, policy: source, want: desired.Scheduler{Name: "sh", Balancing: source}, reason: "policy source-hash"},
		"tuned flag":             {own: Tuning{HashPort: true}, policy: source, want: desired.Scheduler{Name: "mh", Balancing: port}, reason: "choose the scheduler mh instead"},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			config := c.config.WithDefaults()
			config.Tune = func(*desired.Service) Tuning { return c.own }
			e := &Engine{config: config}
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
			_ = tracker.Apply(v1.IPv4Protocol, func(step changetracker.Step) ([]changetracker.ServicePortName, error) {
				x := desired.Explainer{State: step.After, Traits: e.Traits}
				got, err = x.Explain(desired.Packet{Protocol: desired.TCP, Source: netip.MustParseAddr("192.0.2.1"), Destination: vip, Origin: desired.FromOutside})
				return nil, nil
			})
			if err != nil || got.Scheduler != c.want.Name || got.Balancing != c.want.Balancing || !strings.Contains(strings.Join(got.Reasons, "; "), c.reason) {
				t.Errorf("%v, scheduler %s, %v, %q, %v; want %+v and %q", got.Verdict, got.Scheduler, got.Balancing, got.Reasons, err, c.want, c.reason)
			}
			if e.Traits(nil).Scheduler != (desired.Scheduler{}) {
				t.Error("there is a scheduler without a service port")
			}
		})
	}
}
