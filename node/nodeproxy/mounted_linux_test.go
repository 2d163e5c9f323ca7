package nodeproxy_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/nodeproxy"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// cluster is a cluster whose Services an agent serves on this node.
type cluster struct {
	name   string
	number int
	api    *apitest.Server
	dir    string
}

func newCluster(t *testing.T, number int) *cluster {
	t.Helper()
	c := &cluster{name: fmt.Sprintf("c%d", number), number: number, api: apitest.New(t, apitest.Options{}), dir: t.TempDir()}
	c.api.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Status: v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}}},
		proxiertest.Service("shop", "web", proxiertest.ClusterIPs(fmt.Sprintf("10.%d.0.1", number)), proxiertest.Port("", v1.ProtocolTCP, 80)),
		proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.1")))
	return c
}

func (c *cluster) health() string { return fmt.Sprintf("127.0.0.1:%d", 10300+c.number) }

// run runs the proxy, as an agent does that has kube-proxy's configuration.
func (c *cluster) run(ctx context.Context, mode string) error {
	configuration := fmt.Sprintf(`
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clusterCIDR: 10.244.0.0/16
hostnameOverride: node-1
healthzBindAddress: %s
metricsBindAddress: 127.0.0.1:%d
conntrack: {maxPerCore: 0}
nftables: {masqueradeBit: %d}
iptables: {masqueradeBit: %d}
`, mode, c.health(), 10200+c.number, c.number, c.number)
	return nodeproxy.Run(ctx, nodeproxy.Options{Configuration: []byte(configuration), Logger: zap.NewNop()},
		"--master="+c.api.URL(), "--instance="+c.name, "--state-dir="+c.dir, "--debug-socket="+filepath.Join(c.dir, "debug.sock"))
}

// programmed returns what the proxy has not programmed.
func (c *cluster) programmed(ctx context.Context) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	change := programmed.ServiceChange{Versions: changetracker.Versions{EndpointSlices: strconv.FormatUint(c.api.Version(), 10)}}
	report, err := programmed.OverHTTP(client, func(string) string { return "http://" + c.health() + "/programmed" })(ctx, "node-1", change)
	if err != nil {
		return err
	}
	return report.Missing(change)
}

// held is what a process holds.
type held struct {
	goroutines, descriptors int
	heap                    uint64
}

func holds(t *testing.T) held {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	netnstest.Check(t, err)
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return held{runtime.NumGoroutine(), len(open), m.HeapAlloc}
}

// TestTwoClustersInOneProgram: a program starts and stops the proxies of two clusters 20 times, in one network
// namespace. It keeps nothing of them, and they stop too while their API servers are away.
func TestTwoClustersInOneProgram(t *testing.T) {
	const inside = "SERVICEPLANE_TEST_TWO_CLUSTERS"
	if os.Getenv(inside) == "" { // this test again, in a network namespace
		again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestTwoClustersInOneProgram$", "-test.v")
		again.Env = append(os.Environ(), inside+"=yes")
		var output bytes.Buffer
		again.Stdout, again.Stderr = &output, &output
		err := netnstest.New(t).Do(again.Run)
		t.Logf("%s", &output)
		netnstest.Check(t, err)
		return
	}
	clusters := []*cluster{newCluster(t, 1), newCluster(t, 2)}
	before := holds(t)
	var after held
	const times, warm = 20, 4 // the first ones fill caches
	for i := range times {
		if i == warm {
			before.heap = holds(t).heap
		}
		took := startAndStop(t, clusters, i == times-1)
		t.Logf("%d: both have stopped after %v", i, took)
	}
	for _, c := range clusters {
		c.api.Start(t)
	}
	poll.Until(t, "goroutines and descriptors are those of before", func() bool {
		after = holds(t)
		return after.goroutines <= before.goroutines && after.descriptors <= before.descriptors
	})
	t.Logf("held before: %+v, its heap after %d starts; after %d: %+v", before, warm, times, after)
	const noise = 1 << 20
	if after.heap > before.heap+noise {
		t.Errorf("the heap has grown from %d to %d bytes", before.heap, after.heap)
	}
}

// startAndStop has the proxies program everything. It returns how long they take to stop, while the API servers are
// away if that is wanted.
func startAndStop(t *testing.T, clusters []*cluster, away bool) time.Duration {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, len(clusters))
	for _, c := range clusters {
		go func() { ended <- c.run(ctx, "nftables") }()
	}
	for _, c := range clusters {
		poll.Nil(t, "a proxy has programmed its cluster", func() error {
			select {
			case err := <-ended:
				t.Fatalf("a proxy has ended: %v", err)
			default:
			}
			return c.programmed(ctx)
		})
		if away {
			c.api.Stop()
		}
	}
	began := time.Now()
	stop()
	for range clusters {
		if err := <-ended; err != nil {
			t.Errorf("a proxy has ended: %v, want no error", err)
		}
	}
	return time.Since(began)
}

// TestASubcommand: the command works in the command line of another program, and takes the flags of all its commands.
func TestASubcommand(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"proxy --help":    "agent proxy [flags]",
		"proxy --version": "proxy version ",
		"proxy --data-dir=/x --masquerade-all=maybe": `--masquerade-all=maybe: want a value of type bool`,
		"proxy --nonsense":                           "--nonsense: no such flag",
	} {
		agent := &cobra.Command{Use: "agent", SilenceUsage: true, SilenceErrors: true}
		agent.PersistentFlags().String("data-dir", "", "of the agent")
		agent.AddCommand(nodeproxy.New(nodeproxy.Options{Use: "proxy"}))
		var output bytes.Buffer
		agent.SetOut(&output)
		agent.SetArgs(strings.Fields(args))
		err := agent.ExecuteContext(t.Context())
		if got := fmt.Sprint(output.String(), err); !strings.Contains(got, want) || strings.Contains(got, "data-dir=") {
			t.Errorf("agent %s prints %s, want %q", args, got, want)
		}
	}
}

// TestTheConfigurationIsAValue: its faults are named with their line.
func TestTheConfigurationIsAValue(t *testing.T) {
	t.Parallel()
	err := nodeproxy.Run(t.Context(), nodeproxy.Options{Configuration: []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: bpf\n")})
	if err == nil || !strings.Contains(err.Error(), "configuration:3: mode: --proxy-mode=bpf: want nftables") {
		t.Errorf("Run = %v, want an error with the line", err)
	}
}
