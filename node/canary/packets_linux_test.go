package canary_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/iptables"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/node/packettrace"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// unwatched hides that an engine notices changes by others, so that damage stays until the
// next full sync.
type unwatched struct{ proxier.Engine }

func (e unwatched) Abilities() proxier.Abilities {
	can := e.Engine.Abilities()
	can.Watch = nil
	return can
}

// world is a node with a Provider and a canary.
type world struct {
	t        *testing.T
	node     *netns.NS
	provider *proxier.Proxier
	canary   *canary.Canary
	health   http.Handler
	zone     string
}

type makeEngine func(config proxier.Config, family v1.IPFamily) (proxier.Engine, error)

func withNFTables(config proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
	return nftables.NewEngine(nftables.Config{Config: config}, family, proxier.Deps{})
}

func withIPTables(variant iptables.Variant) makeEngine {
	return func(config proxier.Config, family v1.IPFamily) (proxier.Engine, error) {
		return iptables.NewEngine(iptables.Config{Config: config, Variant: variant}, family, proxier.Deps{})
	}
}

// start runs the provider of an engine, and the canary.
func (w *world) start(engine makeEngine, change func(*canary.Options)) {
	w.t.Helper()
	config := w.config()
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		e, err := engine(config, family)
		netnstest.Check(w.t, err)
		engines[family] = unwatched{e}
	}
	var err error
	deps := proxier.Deps{Health: proxier.NoHealth(), Logger: zaptest.NewLogger(w.t)}
	w.provider, err = proxier.New(config, nodedeps.Complete(config, deps), engines)
	netnstest.Check(w.t, err)
	w.run(change)
}

// newNode is a node with a default route to a router that drops everything.
func newNode(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, node: netnstest.New(t), zone: "a"}
	router := netnstest.New(t)
	netnstest.Connect(t, w.node, []string{"192.0.2.10/24", "2001:db8::10/64"}, router, []string{"192.0.2.1/24", "2001:db8::1/64"})
	w.command("ip", "route", "add", "default", "via", "192.0.2.1")
	w.command("ip", "-6", "route", "add", "default", "via", "2001:db8::1")
	return w
}

func (w *world) config() proxier.Config {
	return proxier.Config{
		NetNS: w.node.Path(), Node: changetracker.Node{Name: "node", Zone: w.zone},
		Runner: runner.Options{MinInterval: runner.Unlimited},
	}.WithDefaults()
}

// run runs provider and canary until the test ends.
func (w *world) run(change func(*canary.Options)) {
	w.t.Helper()
	options := canary.Options{
		NetNS: w.node.Path(), Logger: zaptest.NewLogger(w.t),
		Interval: 200 * time.Millisecond, Timeout: 300 * time.Millisecond, Threshold: 500 * time.Millisecond,
	}
	change(&options)
	var err error
	w.canary, err = canary.New(options)
	netnstest.Check(w.t, err)
	w.health = healthcheck.NewHandler(w.canary.Extend(w.provider.Status), healthcheck.HandlerOptions{UnhealthyConditions: []string{canary.ConditionCanary}})
	proxiertest.Run(w.t, w.provider)
	poll.Background(w.t, func(ctx context.Context) error { return w.canary.Run(ctx, w.provider) })
}

func (w *world) command(args ...string) {
	w.t.Helper()
	netnstest.Run(w.t, w.node, args[0], args[1:]...)
}

// expect waits until both families have the state and /healthz the code, and returns the
// failures.
func (w *world) expect(what string, state canary.TestState, code int) (failures string) {
	w.t.Helper()
	poll.Until(w.t, what+": "+state.String(), func() bool {
		status := w.canary.Status()
		failures = status[v1.IPv4Protocol].Failure + "\n" + status[v1.IPv6Protocol].Failure
		return len(status) == 2 && status[v1.IPv4Protocol].State == state && status[v1.IPv6Protocol].State == state
	})
	for path, want := range map[string]int{healthcheck.HealthzPath: code, healthcheck.LivezPath: http.StatusOK} {
		answer := httptest.NewRecorder()
		w.health.ServeHTTP(answer, httptest.NewRequestWithContext(w.t.Context(), http.MethodGet, path, nil))
		var report healthcheck.Healthz
		netnstest.Check(w.t, json.Unmarshal(answer.Body.Bytes(), &report))
		if answer.Code != want || report.Healthy != (want == http.StatusOK) {
			w.t.Errorf("%s: %s answers %d, %s, want %d", what, path, answer.Code, answer.Body, want)
		}
		if named := strings.Contains(strings.Join(report.Reasons, ";"), "IPv6 Canary: a connection to"); named != (state == canary.StateFailing) {
			w.t.Errorf("%s: reasons %q", what, report.Reasons)
		}
	}
	return failures
}

// repair causes a full sync.
func (w *world) repair() {
	w.zone += "a"
	w.provider.OnNodeChange(w.config().Node)
	netnstest.Check(w.t, proxiertest.Sync(w.t.Context(), w.provider))
}

// TestTheCanaryNoticesDamage: connections through the rules pass, fail when the rules are
// deleted, and pass after the repair.
func TestTheCanaryNoticesDamage(t *testing.T) {
	names := proxier.DefaultNames()
	flush := func(variant string) func(*world) {
		return func(w *world) {
			for _, program := range []string{"iptables-", "ip6tables-"} {
				w.command(program+variant, "-t", "nat", "-F")
			}
		}
	}
	for name, test := range map[string]struct {
		engine makeEngine
		damage func(*world)
	}{
		"nftables": {withNFTables, func(w *world) {
			w.command("nft", "delete", "table", "ip", names.Table)
			w.command("nft", "delete", "table", "ip6", names.Table)
		}},
		"iptables-nft":    {withIPTables(iptables.VariantNFT), flush("nft")},
		"iptables-legacy": {withIPTables(iptables.VariantLegacy), flush("legacy")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newNode(t)
			w.start(test.engine, func(*canary.Options) {})
			w.expect("at first", canary.StatePassing, http.StatusOK)
			netnstest.Check(t, proxiertest.Sync(t.Context(), w.provider)) // iptables may be about to write once more
			test.damage(w)
			if got := w.expect("without rules", canary.StateFailing, http.StatusServiceUnavailable); !strings.Contains(got, "connect: no answer in time: the proxy's rules are gone") {
				t.Errorf("reason %q", got)
			}
			w.repair()
			w.expect("repaired", canary.StatePassing, http.StatusOK)
		})
	}
}

// TestTheCanaryOfSockets: the connections go through portals and the proxy's sockets.
func TestTheCanaryOfSockets(t *testing.T) {
	t.Parallel()
	w := newNode(t)
	config := w.config()
	var err error
	w.provider, err = userspace.New(userspace.Config{Config: config, Portals: func(family v1.IPFamily) (proxier.Engine, error) {
		return withNFTables(config, family)
	}}, nodedeps.Complete(config, proxier.Deps{Health: proxier.NoHealth()}))
	netnstest.Check(t, err)
	w.run(func(*canary.Options) {})
	w.expect("at first", canary.StatePassing, http.StatusOK)
}

// TestTheCanaryNamesWhatDrops: a rule or a policy of another program that stops the packets is
// named, and the canary passes when it is gone.
func TestTheCanaryNamesWhatDrops(t *testing.T) {
	for name, engine := range map[string]makeEngine{"nftables": withNFTables, "iptables-nft": withIPTables(iptables.VariantNFT)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newNode(t)
			w.start(engine, func(o *canary.Options) { o.Explain = packettrace.ExplainTest(o.NetNS) })
			w.expect("at first", canary.StatePassing, http.StatusOK)
			for _, foreign := range []struct{ what, chain, rule, want string }{
				{"policy", "type filter hook input priority 0; policy drop;", "", "stopped by the policy drop of chain strict in table inet foreign"},
				{"drop", "type filter hook output priority 0;", "tcp dport 32768-65535 drop", "of chain strict in table inet foreign: see nft -a list chain inet foreign strict"},
				{"reject", "type filter hook input priority 0;", "tcp dport 32768-65535 reject with tcp reset", "of chain strict in table inet foreign: see nft"},
				{"way back", "type filter hook output priority 0;", "tcp sport 1024-65535 tcp flags & (syn|ack) == (syn|ack) drop", "of chain strict in table inet foreign: see nft"},
			} {
				w.command("nft", "add table inet foreign; add chain inet foreign strict { "+foreign.chain+" }")
				if foreign.rule != "" {
					w.command("nft", "add rule inet foreign strict "+foreign.rule)
				}
				got := "" // a busy machine may trace late
				if !poll.Soon(func() bool {
					got = w.expect(foreign.what, canary.StateFailing, http.StatusServiceUnavailable)
					return strings.Count(got, foreign.want) == 2
				}) {
					t.Errorf("%s: reasons\n%s\nwant %q for both families", foreign.what, got, foreign.want)
				}
				w.command("nft", "delete", "table", "inet", "foreign")
				w.expect("without "+foreign.what, canary.StatePassing, http.StatusOK)
			}
			w.expectNoTraceTable()
		})
	}
}

// expectNoTraceTable expects that nothing is left of the traces.
func (w *world) expectNoTraceTable() {
	w.t.Helper()
	err := w.node.Do(func() error {
		out, err := exec.CommandContext(w.t.Context(), "nft", "list", "tables").Output()
		if strings.Contains(string(out), "canary") {
			w.t.Errorf("tables\n%swant none of the canary", out)
		}
		return err
	})
	netnstest.Check(w.t, err)
}
