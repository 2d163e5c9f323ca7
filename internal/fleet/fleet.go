// Package fleet runs the proxies of several nodes in a test: all follow one API server, have the
// recording engine, and answer /programmed.
package fleet

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/endings"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
)

// Fleet is an API server and the proxies of nodes.
type Fleet struct {
	*apitest.Server
	// Config is a kubeconfig file.
	Config string
	// Port is where all nodes answer.
	Port  string
	Nodes []*Node
}

// Node is a Provider that follows the API server, and answers at an address of its own.
type Node struct {
	// Engine and Engine6 are those of IPv4 and of IPv6.
	Engine, Engine6 *proxiertest.RecordingEngine
	// Stop cuts the node off: it follows no change, and answers nobody.
	Stop  func()
	proxy *proxier.Proxier
	mu    sync.Mutex     // guards asked
	asked map[string]int // how often, by address
}

// New starts nodes node-1 and so on, which are Ready, with the label proxy=ours. All listen at the same port.
func New(tb testing.TB, nodes int) *Fleet {
	tb.Helper()
	f := &Fleet{Server: apitest.New(tb, apitest.Options{})}
	f.Config = f.Kubeconfig(tb)
	for _, l := range listen(tb, nodes) {
		f.add(tb, l)
	}
	return f
}

// listen opens listeners at several addresses, with one port.
func listen(tb testing.TB, n int) (all []net.Listener) {
	tb.Helper()
	poll.Nil(tb, "a port that is free at all addresses", func() (err error) {
		port := "0"
		all = nil
		for i := range n {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.7.%d:%s", i+1, port))
			if err != nil {
				for _, l := range all {
					_ = l.Close()
				}
				return err
			}
			_, port, _ = net.SplitHostPort(l.Addr().String())
			all = append(all, l)
		}
		return nil
	})
	return all
}

func (f *Fleet) add(tb testing.TB, l net.Listener) {
	tb.Helper()
	n := &Node{Engine: &proxiertest.RecordingEngine{}, Engine6: &proxiertest.RecordingEngine{}, asked: map[string]int{}}
	name := "node-" + strconv.Itoa(len(f.Nodes)+1)
	host, port, _ := net.SplitHostPort(l.Addr().String())
	f.Port = port
	f.Put(tb, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"proxy": "ours", v1.LabelTopologyZone: endings.Zone(name)}}, Status: v1.NodeStatus{
		Addresses:  []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: host}},
		Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}},
	}})
	var err error
	n.proxy, err = proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}, Runner: runner.Options{
		MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: 10 * time.Millisecond, Max: 50 * time.Millisecond},
	}}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: n.Engine, v1.IPv6Protocol: n.Engine6})
	if err != nil {
		tb.Fatal(err)
	}
	ctx, stop := context.WithCancel(tb.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = n.proxy.Run(ctx) })
	running.Go(func() { _ = informer.Run(ctx, &rest.Config{Host: f.URL()}, n.proxy, informer.Options{NodeName: name}) })
	handler := programmed.Handler(name, n.proxy)
	_, stopServer := apitest.ServeAt(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.count(r.URL.Query()["endpoint"])
		handler.ServeHTTP(w, r)
	}))
	n.Stop = sync.OnceFunc(func() { stopServer(); stop(); running.Wait() })
	tb.Cleanup(n.Stop)
	f.Nodes = append(f.Nodes, n)
}

// Follow waits until some nodes have programmed all that was put.
func (f *Fleet) Follow(tb testing.TB, nodes ...*Node) {
	tb.Helper()
	version := strconv.FormatUint(f.Version(), 10)
	for _, n := range nodes {
		poll.Nil(tb, "a node that follows", func() error {
			report := programmed.NewReport("", n.proxy, time.Now())
			return report.Missing(programmed.ServiceChange{Versions: changetracker.Versions{EndpointSlices: version}})
		})
	}
}

// Eject has a node give no new connections to an endpoint, as its health checks do.
func (n *Node) Eject(name changetracker.ServicePortName, endpoint netip.AddrPort) {
	n.proxy.Tracker().Override(name, endpoint, changetracker.Override{Eject: true})
	n.proxy.Trigger()
}

// Sends reports whether a node sends connections of a Service to an address.
func (n *Node) Sends(service, addr string) bool {
	for _, engine := range []*proxiertest.RecordingEngine{n.Engine, n.Engine6} {
		for name, s := range engine.Services() {
			for e := range s.Cluster.All() {
				if name.Name == service && e.Addr().String() == addr {
					return true
				}
			}
		}
	}
	return false
}

// Rounds returns a function that reports whether a node was asked in several rounds since, about an address or, if
// that is empty, anything: all others were asked in the one before.
func (n *Node) Rounds(addr string) func() bool {
	const rounds = 3
	before := n.times(addr)
	return func() bool { return n.times(addr) >= before+rounds }
}

// WaitRounds waits for Rounds.
func (n *Node) WaitRounds(tb testing.TB, addr string) {
	tb.Helper()
	poll.Until(tb, "more questions", n.Rounds(addr))
}

func (n *Node) count(endpoints []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked[""]++
	for _, e := range endpoints {
		if endpoint, err := programmed.ParseEndpoint(e); err == nil {
			n.asked[endpoint.Addr().String()]++
		}
	}
}

func (n *Node) times(addr string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked[addr]
}
