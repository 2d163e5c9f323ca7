package informer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// cluster is a Proxier with a recording engine, connected to an API server.
type cluster struct {
	*apitest.Server // nil with a fake client
	engine          *proxiertest.RecordingEngine
	proxier         *proxier.Proxier
	logs            *observer.ObservedLogs
	link            *Link
	end             func()
}

func startCluster(t *testing.T, server apitest.Options, o Options, objects ...runtime.Object) *cluster {
	t.Helper()
	return startClusterWith(t, asItIs, func(*rest.Config) {}, server, o, objects...)
}

func asItIs(e *proxiertest.RecordingEngine) proxier.Engine { return e }

func startClusterWith(t *testing.T, wrap func(*proxiertest.RecordingEngine) proxier.Engine, tune func(*rest.Config), server apitest.Options, o Options, objects ...runtime.Object) *cluster {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	o.Logger = zap.New(core)
	c := &cluster{Server: apitest.New(t, server), engine: &proxiertest.RecordingEngine{}, logs: logs}
	c.Put(t, objects...)
	config, p := clientConfig(t, c.Server), newProxier(t, wrap(c.engine), o.ServiceProxyName)
	c.proxier, c.link = p, NewLink(LinkOptions{})
	c.link.Attach(config)
	tune(config)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Errorf("Run of the Proxier: %v", err)
		}
	})
	running.Go(func() {
		if err := Run(ctx, config, p, o); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	c.end = func() { cancel(); running.Wait() }
	t.Cleanup(c.end)
	return c
}

// clientConfig returns the configuration of a typical client.
func clientConfig(t *testing.T, server *apitest.Server) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", server.Kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func newProxier(t *testing.T, engine proxier.Engine, proxyName string) *proxier.Proxier {
	t.Helper()
	p, err := proxier.New(proxier.Config{
		Families: []v1.IPFamily{v1.IPv4Protocol}, Runner: runner.Options{MinInterval: runner.Unlimited},
		Tracker: changetracker.ObjectOptions{ServiceProxyName: proxyName},
	}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// requests returns the requests to the API server, if there is one.
func (c *cluster) requests() []string {
	if c.Server == nil {
		return nil
	}
	return c.Requests()
}

// asked reports whether there was a request of a kind, such as "LIST services".
func (c *cluster) asked(what string) bool {
	return slices.ContainsFunc(c.Requests(), func(r string) bool { return strings.HasPrefix(r, what+"?") })
}

// holds returns the state of the engine: each VIP with its endpoints.
func (c *cluster) holds() string {
	var lines []string
	for _, s := range c.engine.Services() {
		for i := range s.Frontends {
			lines = append(lines, s.Frontends[i].VIP.String()+"="+texts(s.Cluster.Slice()))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, " ")
}

func texts(addrs []netip.AddrPort) string {
	all := make([]string, len(addrs))
	for i, a := range addrs {
		all[i] = a.Addr().String()
	}
	return strings.Join(all, ",")
}

func (c *cluster) mustHold(t *testing.T, want string) {
	t.Helper()
	if !poll.Soon(func() bool { return c.holds() == want }) {
		t.Fatalf("the engine has %q, want %q\nrequests %v\nlog %v", c.holds(), want, c.requests(), c.logs.All())
	}
}

func labelledService(name, ip, proxy string) *v1.Service {
	s := service(name, ip)
	s.Labels = map[string]string{changetracker.LabelServiceProxyName: proxy}
	return s
}

func bothWays(t *testing.T, test func(t *testing.T, o apitest.Options)) {
	t.Parallel()
	for name, watchList := range map[string]bool{"lists are streamed": true, "lists are lists": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, apitest.Options{WatchList: watchList})
		})
	}
}

// Existing objects, selections (CFG-02, CFG-03), changes, and relabelling in both
// directions, over real HTTP.
func TestRunFollowsAnAPIServer(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		none := proxiertest.Service("test", "none", proxiertest.Headless(), proxiertest.Port("web", v1.ProtocolTCP, 80))
		c := startCluster(t, o, Options{NodeName: "Me"}, service("a", "10.96.0.1"), slice("a", "10.244.0.1"), node("me", ""), node("other", ""),
			labelledService("theirs", "10.96.0.9", "other"), none, headless(slice("none", "10.244.0.9")), cidr("c", "10.96.0.0/16"))
		c.mustHold(t, "10.96.0.1=10.244.0.1")
		c.Put(t, service("b", "10.96.0.2"), slice("b", "10.244.0.2"), slice("a", "10.244.0.1", "10.244.0.3"))
		c.mustHold(t, "10.96.0.1=10.244.0.1,10.244.0.3 10.96.0.2=10.244.0.2")
		c.Put(t, labelledService("a", "10.96.0.1", "other"))
		c.mustHold(t, "10.96.0.2=10.244.0.2")
		c.Put(t, service("a", "10.96.0.1"), headless(slice("b", "10.244.0.2")))
		c.mustHold(t, "10.96.0.1=10.244.0.1,10.244.0.3 10.96.0.2=")
		c.Delete(t, service("a", ""), slice("a"))
		c.mustHold(t, "10.96.0.2=")
		for _, resource := range []string{"services", "endpointslices", "servicecidrs", "nodes"} {
			if lists := c.asked("LIST " + resource); lists == o.WatchList {
				t.Errorf("requests %v, with lists streamed: %v", c.Requests(), o.WatchList)
			}
		}
		if n := c.logs.Len(); n != 0 {
			t.Errorf("log %v, want nothing", c.logs.All())
		}
	})
}

// answers records the content types of what a server answers.
type answers struct {
	http.RoundTripper

	mu    sync.Mutex
	types map[string]bool
}

// RoundTrip implements http.RoundTripper.
func (a *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := a.RoundTripper.RoundTrip(r)
	if err == nil && answer.StatusCode == http.StatusOK {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.types[answer.Header.Get("Content-Type")] = true
	}
	return answer, err
}

// An API server that can answers in protobuf, unless the program asks for JSON.
func TestAnswersAreProtobuf(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		o.Protobuf = true
		for accepted, want := range map[string][]string{
			"":                      {runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf + ";stream=watch"},
			runtime.ContentTypeJSON: {runtime.ContentTypeJSON},
		} {
			a := &answers{types: map[string]bool{}}
			tune := func(config *rest.Config) {
				config.AcceptContentTypes = accepted
				config.Wrap(func(next http.RoundTripper) http.RoundTripper { a.RoundTripper = next; return a })
			}
			c := startClusterWith(t, asItIs, tune, o, Options{}, service("a", "10.96.0.1"), slice("a", "10.244.0.1"))
			c.mustHold(t, "10.96.0.1=10.244.0.1")
			c.end()
			if got := slices.Sorted(maps.Keys(a.types)); len(got) == 0 || slices.ContainsFunc(got, func(kind string) bool { return !slices.Contains(want, kind) }) {
				t.Errorf("a program that asks for %q gets %q, want %q", accepted, got, want)
			}
		}
	})
}

// The API server's warnings, which client-go logs, go to Options.Logger.
func TestWhatClientGoSaysIsLogged(t *testing.T) {
	c := startCluster(t, apitest.Options{Warning: "slices of v0 are deprecated"}, Options{}, service("a", "10.96.0.1"))
	poll.Until(t, "a line of client-go about the warning", func() bool {
		return slices.ContainsFunc(c.logs.All(), func(e observer.LoggedEntry) bool {
			return e.LoggerName == "informer.client-go" && e.Message == "Warning: slices of v0 are deprecated"
		})
	})
}

// The requests have selectors: CFG-02, CFG-03, CFG-05, CFG-20.
func TestTheServerSelects(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		c := startCluster(t, o, Options{NodeName: "me"}, service("a", "10.96.0.1"), slice("a", "10.244.0.1"), node("me", ""))
		c.mustHold(t, "10.96.0.1=10.244.0.1")
		poll.Until(t, "watches of four resources", func() bool {
			return c.asked("WATCH services") && c.asked("WATCH endpointslices") && c.asked("WATCH servicecidrs") && c.asked("WATCH nodes")
		})
		selectors := map[string]string{
			"services":       "&fieldSelector=spec.clusterIP!=None&labelSelector=!service.kubernetes.io/service-proxy-name",
			"endpointslices": "&labelSelector=!service.kubernetes.io/headless",
			"nodes":          "&fieldSelector=metadata.name=me",
			"servicecidrs":   "",
		}
		for _, request := range c.Requests() {
			_, resource, _ := strings.Cut(request, " ")
			resource, query, _ := strings.Cut(resource, "?")
			want, known := selectors[resource]
			if !known || !strings.Contains("&"+query, want) || strings.Contains(query, "Selector") != (want != "") {
				t.Errorf("request %q, want selection %q", request, want)
			}
		}
	})
}

func TestRunServesAnotherProxyName(t *testing.T) {
	t.Parallel()
	c := startCluster(t, apitest.Options{WatchList: true}, Options{ServiceProxyName: "mine"},
		service("a", "10.96.0.1"), labelledService("b", "10.96.0.2", "mine"), labelledService("c", "10.96.0.3", "theirs"))
	c.mustHold(t, "10.96.0.2=")
}

// After an outage of the server, Run receives the changes and deletions that happened
// meanwhile, even if the server has compacted its history.
func TestRunSurvivesTheServersAbsence(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		for _, compact := range []string{"with its history", "without its history"} {
			t.Run(compact, func(t *testing.T) {
				t.Parallel()
				c := startCluster(t, o, Options{}, service("a", "10.96.0.1"), slice("a", "10.244.0.1"), service("b", "10.96.0.2"))
				c.mustHold(t, "10.96.0.1=10.244.0.1 10.96.0.2=")
				c.Stop()
				c.Put(t, slice("a", "10.244.0.5"), service("c", "10.96.0.3"))
				c.Delete(t, service("b", ""))
				if compact == "without its history" {
					c.Compact()
				}
				poll.Until(t, "a request fails", func() bool { reachable, _ := c.link.Reachable(); return !reachable })
				if got := c.holds(); got != "10.96.0.1=10.244.0.1 10.96.0.2=" {
					t.Errorf("the engine has %q while the server is away, want what it had", got)
				}
				c.Start(t)
				c.mustHold(t, "10.96.0.1=10.244.0.5 10.96.0.3=")
			})
		}
	})
}

// In random histories, changes happen while the server runs, is down, has compacted its
// history, or restarts.
func TestRunEndsUpRight(t *testing.T) {
	bothWays(t, func(t *testing.T, o apitest.Options) {
		for seed := range uint64(4) {
			t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
				t.Parallel()
				random := rand.New(rand.NewPCG(seed, 1))
				c := startCluster(t, o, Options{}, service("s0", "10.96.0.1"))
				c.mustHold(t, "10.96.0.1=")
				state, away := map[int]string{0: ""}, false
				for range 60 {
					switch n := random.IntN(4); random.IntN(12) {
					case 0:
						c.toggle(t, away)
						away = !away
						time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond)
					case 1:
						c.Compact()
					case 2, 3, 4:
						c.Delete(t, service("s"+strconv.Itoa(n), ""), slice("s"+strconv.Itoa(n)))
						delete(state, n)
					default:
						addr := "10.244.0." + strconv.Itoa(1+random.IntN(9))
						c.Put(t, slice("s"+strconv.Itoa(n), addr), service("s"+strconv.Itoa(n), "10.96.0."+strconv.Itoa(n+1)))
						state[n] = addr
					}
				}
				if away {
					c.toggle(t, away)
				}
				var want []string
				for n, addr := range state {
					want = append(want, "10.96.0."+strconv.Itoa(n+1)+"="+addr)
				}
				slices.Sort(want)
				c.mustHold(t, strings.Join(want, " "))
			})
		}
	})
}

// toggle starts a server that is down, and stops one that runs.
func (c *cluster) toggle(t *testing.T, away bool) {
	t.Helper()
	if away {
		c.Start(t)
		return
	}
	c.Stop()
}

// Nothing is programmed before the server starts.
func TestRunWaitsForAServerThatIsNotThere(t *testing.T) {
	t.Parallel()
	server := apitest.New(t, apitest.Options{})
	server.Stop()
	config := clientConfig(t, server)
	r := &recorder{}
	core, logs := observer.New(zap.DebugLevel)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, config, r, Options{WaitTimeout: time.Millisecond, Logger: zap.New(core)}) }()
	absence := func() []observer.LoggedEntry { return logs.FilterMessageSnippet("nothing is programmed yet").All() }
	poll.Until(t, "a line about the absence", func() bool { return len(absence()) == 1 })
	if got := absence()[0].LoggerName; got != "informer" {
		t.Errorf("logger %q, want %q", got, "informer")
	}
	if calls := r.all(); len(calls) != 0 {
		t.Errorf("calls %v without a server, want none", calls)
	}
	server.Put(t, service("a", "10.96.0.1"))
	server.Start(t)
	r.eventually(t, "slices synced")
	if calls := r.all(); !slices.Contains(calls, "add a") {
		t.Errorf("calls %v, want the Service", calls)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v, want nil when ctx ends", err)
	}
}

// The first sync does not wait for ServiceCIDRs that an API server does not have, and says so once.
func TestAnOldAPIServerHasNoServiceCIDRs(t *testing.T) {
	t.Parallel()
	c := startCluster(t, apitest.Options{Hidden: []string{"servicecidrs"}}, Options{WaitTimeout: 24 * time.Hour},
		service("a", "10.96.0.1"), slice("a", "10.244.0.1"))
	c.mustHold(t, "10.96.0.1=10.244.0.1")
	if n := c.logs.FilterField(zap.String("objects", "ServiceCIDRs")).Len(); n != 1 {
		t.Errorf("%d lines about ServiceCIDRs, want 1: %v", n, c.logs.All())
	}
}

// Without permission to read the Node and the ServiceCIDRs, the first sync happens without
// them, and the log names them.
func TestAForbiddenKindDoesNotHoldUp(t *testing.T) {
	t.Parallel()
	c := startCluster(t, apitest.Options{Forbidden: []string{"nodes", "servicecidrs"}}, Options{NodeName: "me", WaitTimeout: 24 * time.Hour},
		service("a", "10.96.0.1"), slice("a", "10.244.0.1"))
	c.mustHold(t, "10.96.0.1=10.244.0.1")
	given := c.logs.FilterMessageSnippet("first sync starts without").FilterField(zap.Strings("missing", []string{"ServiceCIDRs", "Node me"}))
	if given.Len() != 1 || c.logs.FilterMessageSnippet("watch of the API server").Len() != 2 {
		t.Errorf("log %v, want one line about the missing objects, and one for each error", c.logs.All())
	}
}

// Who has given a wrong node name is told some that exist.
func TestAWrongNodeNameHasAHint(t *testing.T) {
	t.Parallel()
	c := startCluster(t, apitest.Options{}, Options{NodeName: "my", WaitTimeout: 50 * time.Millisecond}, service("a", "10.96.0.1"), node("me", ""), node("other", ""))
	c.mustHold(t, "10.96.0.1=")
	hint := c.logs.FilterField(zap.Strings("nodes that exist", []string{"me", "other"})).All()
	if len(hint) != 1 || !slices.Contains(hint[0].ContextMap()["missing"].([]any), any("Node my")) { // others may be late
		t.Errorf("log %v, want one line with both nodes", c.logs.All())
	}
}

// A Node that comes back without what it had keeps it, and the log says so once.
func TestANodeKeepsWhatItsObjectLacks(t *testing.T) {
	core, logs := observer.New(zap.DebugLevel)
	r := &recorder{}
	f := &nodeFeed{provider: r, name: "me", log: zap.New(core), seen: make(chan struct{})}
	whole := node("me", "a", v1.NodeAddress{Type: v1.NodeInternalIP, Address: "192.0.2.1"})
	whole.Spec.PodCIDRs = []string{"10.1.0.0/24"}
	f.changed(whole)
	f.deleted(whole)
	for range 3 {
		f.changed(node("me", "b"))
	}
	last := func() string {
		n := r.nodes[len(r.nodes)-1]
		return fmt.Sprintf("%v %v %s%s", n.Addresses, n.PodCIDRs, n.Zone, n.Draining)
	}
	if got, want := last(), "[192.0.2.1] [10.1.0.0/24] b"; got != want || logs.FilterField(zap.Strings("missing", []string{"status.addresses", "spec.podCIDRs"})).Len() != 1 {
		t.Errorf("the node is %q, want %q; log %v, want one line about it", got, want, logs.All())
	}
	whole.Status.Addresses[0].Address = "192.0.2.2"
	f.changed(whole)
	if got, want := last(), "[192.0.2.2] [10.1.0.0/24] a"; got != want {
		t.Errorf("the node is %q, want %q", got, want)
	}
}

// An error is logged once until it changes, or occurs again after repeatAfter. The normal
// end of a watch is no error.
func TestAnErrorIsOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		c := &watchErrors{log: zap.New(core), kind: kindServices}
		refused, reset := errors.New("connection refused"), errors.New("connection reset")
		for _, step := range []struct {
			after time.Duration
			err   error
			want  int
		}{
			{0, io.EOF, 0},
			{0, apierrors.NewResourceExpired("too old"), 0},
			{0, refused, 1},
			{time.Minute, refused, 1},
			{repeatAfter - time.Second, refused, 1},
			{time.Second, reset, 2},
			{time.Second, refused, 3},
			{repeatAfter, refused, 4},
		} {
			time.Sleep(step.after)
			c.handle(t.Context(), nil, step.err)
			if got := logs.Len(); got != step.want {
				t.Errorf("%d lines after %q, want %d", got, step.err, step.want)
			}
		}
	})
}

func TestBadOptionsAreAnError(t *testing.T) {
	if err := Run(t.Context(), &rest.Config{}, &recorder{}, Options{WaitTimeout: -1}); err == nil || !strings.Contains(err.Error(), "WaitTimeout") {
		t.Errorf("Run = %v, want an error that names WaitTimeout", err)
	}
}
