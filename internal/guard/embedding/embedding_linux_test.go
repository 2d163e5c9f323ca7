package embedding

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/nodedeps"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node returns a node with the Service's endpoint on it.
func node(t *testing.T) *netns.NS {
	t.Helper()
	ns := netnstest.New(t)
	for _, own := range []string{"192.0.2.0/24", "198.51.100.0/24"} {
		netnstest.Check(t, ns.AddRange(netip.MustParsePrefix(own)))
	}
	netnstest.Serve(t, ns, "web", 8080)
	return ns
}

func ask(t *testing.T, ns *netns.NS) error {
	t.Helper()
	_, err := netns.Ask(t.Context(), ns, "tcp", netip.MustParseAddrPort("192.0.2.10:80"), netns.AskOptions{Timeout: time.Second})
	return err
}

// running runs f until the test ends.
func running(t *testing.T, f func(ctx context.Context) error) {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(func() {
		stop()
		wg.Wait()
	})
}

func TestTheControllerOfTheDocument(t *testing.T) {
	ns := node(t)
	p, err := nftables.New(nftables.Config{Config: proxier.Config{NetNS: ns.Path()}}, proxier.Deps{})
	if err != nil {
		t.Fatal(err)
	}
	running(t, p.Run)
	if err := controller(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if err := ask(t, ns); err != nil {
		t.Error(err)
	}
	text, err := explain(t.Context(), p)
	if err != nil || !strings.HasPrefix(text, "forward ") || !strings.Contains(text, "198.51.100.7:8080") {
		t.Errorf("explained as %q, %v, want it forwarded to 198.51.100.7:8080", text, err)
	}
}

func TestTheDistributionOfTheDocument(t *testing.T) {
	ns := node(t)
	api := apitest.New(t, apitest.Options{WatchList: true})
	api.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}},
		proxiertest.Service("lab", "web", proxiertest.ClusterIPs("192.0.2.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)),
		proxiertest.Slice("lab", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("198.51.100.7")))
	config, err := clientcmd.BuildConfigFromFlags("", api.Kubeconfig(t))
	if err != nil {
		t.Fatal(err)
	}
	own := program{config: config, registry: prometheus.NewRegistry(), mux: http.NewServeMux(), log: zap.NewNop()}
	running(t, func(ctx context.Context) error {
		return inProcess(ctx, own, proxier.Config{NetNS: ns.Path()}, "node-1")
	})
	get := func(path string) (int, string) {
		answer := httptest.NewRecorder()
		own.mux.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1"+path, nil))
		return answer.Code, answer.Body.String()
	}
	poll.Nil(t, "/healthz is OK", func() error {
		if code, text := get("/healthz"); code != http.StatusOK {
			return fmt.Errorf("%d: %s", code, text)
		}
		return nil
	})
	if err := ask(t, ns); err != nil {
		t.Error(err)
	}
	if code, text := get("/debug/services/status"); code != http.StatusOK {
		t.Errorf("/debug/services/status: %d: %s", code, text)
	}
}

// newEngine stands for the engine of a reader.
func newEngine(config proxier.Config, family v1.IPFamily, deps proxier.Deps) (proxier.Engine, error) {
	return nftables.NewEngine(nftables.Config{Config: config}, family, deps)
}

func TestYourEngine(t *testing.T) {
	features := proxiertest.Features{
		Select: func(name string) bool { return name == "PKT-01" }, // without it, all scenarios run
		Skip:   map[string]string{"PKT-60": "no affinity"},         // a rule and the reason
	}
	proxiertest.Conformance(t, features, func(config proxier.Config, deps proxier.Deps) (proxier.Provider, error) {
		deps = nodedeps.Complete(config, deps)
		engines := map[v1.IPFamily]proxier.Engine{}
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			engine, err := newEngine(config, family, deps)
			if err != nil {
				return nil, err
			}
			engines[family] = engine
		}
		return proxier.New(config, deps, engines)
	})
}
