package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	nft "github.com/google/nftables"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// world is a network that bypasses the node: the pods are connected to their own switch,
// like those of macvlan and SR-IOV.
type world struct {
	t       *testing.T
	api     *apitest.Server
	fabric  *netns.NS
	bin     string // programs
	dir     string // links and socket
	list    *libcni.NetworkConfigList
	runtime *libcni.CNIConfig
	pods    map[string]*netns.NS // by container
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, fabric: netnstest.New(t), bin: t.TempDir(), dir: t.TempDir(), pods: map[string]*netns.NS{}}
	w.api = apitest.New(t, apitest.Options{WatchList: true})
	w.api.Put(t, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
	for _, program := range []string{".", "./agent"} {
		build := exec.CommandContext(t.Context(), "go", "build", "-o", w.bin+"/", program)
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build %s: %v\n%s", program, err, out)
		}
	}
	if err := w.fabric.AddBridge("switch", netip.MustParsePrefix("10.244.0.1/24")); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "fast", "plugins": [{"type": "cable"}, {"type": "cni-plugin", "dir": %q}]}`, w.dir)
	var err error
	if w.list, err = libcni.ConfListFromBytes([]byte(text)); err != nil {
		t.Fatal(err)
	}
	w.runtime = w.newRuntime()
	return w
}

// newRuntime returns a runtime without pods.
func (w *world) newRuntime() *libcni.CNIConfig {
	plugins := cable{Exec: &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}, w: w}
	return libcni.NewCNIConfigWithCacheDir([]string{w.bin}, w.t.TempDir(), plugins)
}

// connect connects a network namespace to the switch.
func (w *world) connect(ns *netns.NS, link, addr string) {
	w.t.Helper()
	err := errors.Join(
		netns.Connect(netns.Plug{NS: w.fabric, Link: link}, netns.Plug{NS: ns, Link: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix(addr + "/24")}}),
		w.fabric.Enslave(link, "switch"),
		ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("10.244.0.1")),
	)
	if err != nil {
		w.t.Fatal(err)
	}
}

// server adds a pod with a server.
func (w *world) server(name, addr string) {
	ns := netnstest.New(w.t)
	w.connect(ns, name, addr)
	netnstest.Serve(w.t, ns, name, 8080)
}

// cable is the previous plugin in the chain. It connects the pod to the switch.
type cable struct {
	invoke.Exec
	w *world
}

func (c cable) FindInPath(plugin string, paths []string) (string, error) {
	if plugin == "cable" {
		return plugin, nil
	}
	return c.Exec.FindInPath(plugin, paths)
}

func (c cable) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	if path != "cable" {
		return c.Exec.ExecPlugin(ctx, path, stdin, environ)
	}
	env := map[string]string{}
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	if env["CNI_COMMAND"] != "ADD" {
		return nil, nil
	}
	id := env["CNI_CONTAINERID"]
	addr := "10.244.0.10" + id[len(id)-1:]
	c.w.connect(c.w.pods[id], id, addr)
	return fmt.Appendf(nil, `{"cniVersion": "1.1.0", "ips": [{"address": "%s/24"}]}`, addr), nil
}

// pod creates the network namespace of a new pod, like a runtime.
func (w *world) pod(id string) *libcni.RuntimeConf {
	w.pods[id] = netnstest.New(w.t)
	return &libcni.RuntimeConf{ContainerID: id, NetNS: w.pods[id].Path(), IfName: "eth0"}
}

// startAgent starts the agent, waits until the plugin is ready, and returns a function that
// stops the agent.
func (w *world) startAgent() (stop func()) {
	w.t.Helper()
	agent := exec.Command(filepath.Join(w.bin, "agent"), "-kubeconfig", w.api.Kubeconfig(w.t), "-node", "node-1", "-dir", w.dir)
	agent.Stderr = os.Stderr
	if err := agent.Start(); err != nil {
		w.t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		if err := errors.Join(agent.Process.Signal(syscall.SIGTERM), agent.Wait()); err != nil {
			w.t.Errorf("agent: %v", err)
		}
	})
	w.t.Cleanup(stop)
	poll.Nil(w.t, "the plugin is ready", func() error { return w.runtime.GetStatusNetworkList(w.t.Context(), w.list) })
	return stop
}

// publish makes a server the endpoint of the Service.
func (w *world) publish(addr string) {
	w.api.Put(w.t,
		proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80)),
		proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint(addr)))
}

// ask returns an error unless the pod reaches the server through the Service.
func (w *world) ask(id, server string) error {
	answer, err := netns.Ask(w.t.Context(), w.pods[id], "tcp", netip.MustParseAddrPort("10.96.0.10:80"), netns.AskOptions{Timeout: time.Second})
	if err == nil && answer.Server != server {
		err = fmt.Errorf("%q answers, want %q", answer.Server, server)
	}
	return err
}

// tables returns the nf_tables tables in a pod.
func (w *world) tables(id string) (names []string) {
	w.t.Helper()
	err := w.pods[id].Do(func() error {
		conn, err := nft.New()
		if err != nil {
			return err
		}
		tables, err := conn.ListTables()
		for _, table := range tables {
			names = append(names, table.Name)
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return names
}

func code(err error) uint {
	if e, ok := errors.AsType[*types.Error](err); ok {
		return e.Code
	}
	return 0
}

// TestPodsHaveServices: a runtime calls the plugin, and the pod reaches the Service without
// the node.
func TestPodsHaveServices(t *testing.T) {
	w := newWorld(t)
	w.server("server-a", "10.244.0.2")
	w.server("server-b", "10.244.0.3")
	w.publish("10.244.0.2")
	one, two := w.pod("pod1"), w.pod("pod2")

	if err := w.runtime.GetStatusNetworkList(t.Context(), w.list); code(err) != types.ErrPluginNotAvailable {
		t.Errorf("STATUS without an agent = %v, want code %d", err, types.ErrPluginNotAvailable)
	}
	stop := w.startAgent()
	result, err := w.runtime.AddNetworkList(t.Context(), w.list, one)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.ask("pod1", "server-a"); err != nil { // at once: ADD has waited
		t.Error(err)
	}
	if got, err := types100.GetResult(result); err != nil || len(got.IPs) != 1 || got.IPs[0].Address.IP.String() != "10.244.0.101" {
		t.Errorf("result is %v, %v, want that of the previous plugin", result, err)
	}
	if err := w.runtime.CheckNetworkList(t.Context(), w.list, one); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	w.publish("10.244.0.3")
	poll.Nil(w.t, "the pod follows", func() error { return w.ask("pod1", "server-b") })

	stop()
	if err := w.ask("pod1", "server-b"); err != nil {
		t.Errorf("without an agent: %v", err)
	}
	w.publish("10.244.0.2")
	w.startAgent()
	poll.Nil(w.t, "the pod follows the next agent", func() error { return w.ask("pod1", "server-a") })

	if _, err := w.runtime.AddNetworkList(t.Context(), w.list, two); err != nil {
		t.Fatal(err)
	}
	if err := w.ask("pod2", "server-a"); err != nil {
		t.Error(err)
	}
	for range 2 { // the runtime may repeat it
		if err := w.runtime.DelNetworkList(t.Context(), w.list, two); err != nil {
			t.Errorf("DEL: %v", err)
		}
	}
	if left := w.tables("pod2"); len(left) != 0 {
		t.Errorf("DEL leaves %v", left)
	}
	if err := w.ask("pod1", "server-a"); err != nil {
		t.Errorf("after the other pod's DEL: %v", err)
	}
	if err := w.runtime.CheckNetworkList(t.Context(), w.list, one); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

// TestGarbageCollection: DEL works without an agent, and GC removes the other links.
func TestGarbageCollection(t *testing.T) {
	w := newWorld(t)
	stop := w.startAgent()
	one, two, three := w.pod("pod1"), w.pod("pod2"), w.pod("pod3")
	for _, pod := range []*libcni.RuntimeConf{one, two, three} {
		if _, err := w.runtime.AddNetworkList(t.Context(), w.list, pod); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if err := w.runtime.DelNetworkList(t.Context(), w.list, three); err != nil {
		t.Errorf("DEL without an agent: %v", err)
	}
	w.startAgent()
	valid := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: "pod2", IfName: "eth0"}}}
	if err := w.newRuntime().GCNetworkList(t.Context(), w.list, valid); err != nil {
		t.Errorf("GC: %v", err)
	}
	if left := w.tables("pod1"); len(left) != 0 {
		t.Errorf("GC leaves %v", left)
	}
	if err := w.runtime.CheckNetworkList(t.Context(), w.list, one); err == nil {
		t.Error("CHECK of a pod that GC has removed succeeds")
	}
	if err := w.runtime.CheckNetworkList(t.Context(), w.list, two); err != nil {
		t.Errorf("CHECK of a valid pod: %v", err)
	}
	links, err := filepath.Glob(filepath.Join(w.dir, "*.pod"))
	if want := filepath.Join(w.dir, "fast,pod2,eth0.pod"); err != nil || len(links) != 1 || links[0] != want {
		t.Errorf("links are %v, %v, want %s", links, err, want)
	}
}

// TestThePluginIsChained: without a previous plugin, ADD fails.
func TestThePluginIsChained(t *testing.T) {
	w := newWorld(t)
	w.startAgent()
	w.list.Plugins = w.list.Plugins[1:]
	_, err := w.runtime.AddNetworkList(t.Context(), w.list, w.pod("pod1"))
	if code(err) != types.ErrInvalidNetworkConfig {
		t.Errorf("ADD without a previous plugin = %v, want code %d", err, types.ErrInvalidNetworkConfig)
	}
}
