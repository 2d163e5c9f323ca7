package nodeproxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/endings"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// line carries the bytes of an API server to a client, late or not at all.
type line struct {
	to    string
	delay time.Duration

	mu   sync.Mutex    // guards gate
	gate chan struct{} // closed while bytes pass
}

// newLine listens in a namespace.
func newLine(t *testing.T, ns *netns.NS, address, to string, delay time.Duration) *line {
	t.Helper()
	l := &line{to: to, delay: delay, gate: make(chan struct{})}
	close(l.gate)
	listener, err := ns.Listen(t.Context(), "tcp", address)
	netnstest.Check(t, err)
	var running sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { l.carry(ctx, conn) })
		}
	})
	t.Cleanup(func() { stop(); _ = listener.Close(); running.Wait() })
	return l
}

// chunk is what was read at once.
type chunk struct {
	bytes []byte
	at    time.Time
}

func (l *line) carry(ctx context.Context, client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", l.to)
	if err != nil {
		return
	}
	ctx, stop := context.WithCancel(ctx)
	defer context.AfterFunc(ctx, func() { _ = client.Close(); _ = server.Close() })()
	var copying sync.WaitGroup
	copying.Go(func() { _, _ = io.Copy(server, client); stop() })
	late := make(chan chunk, 1<<12)
	copying.Go(func() {
		defer close(late)
		for {
			buffer := make([]byte, 1<<14)
			n, err := server.Read(buffer)
			if err != nil {
				return
			}
			late <- chunk{buffer[:n], time.Now()}
		}
	})
	for c := range late {
		if !l.pass(ctx, time.Until(c.at.Add(l.delay))) {
			break
		}
		if _, err := client.Write(c.bytes); err != nil {
			break
		}
	}
	stop()
	for range late { // so that the reader ends
	}
	copying.Wait()
}

// pass waits, and then until the line is not cut.
func (l *line) pass(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
	case <-ctx.Done():
		return false
	}
	l.mu.Lock()
	gate := l.gate
	l.mu.Unlock()
	select {
	case <-gate:
		return true
	case <-ctx.Done():
		return false
	}
}

// cut lets no more bytes pass.
func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gate = make(chan struct{})
}

// open lets the bytes pass again.
func (l *line) open() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.gate)
}

// fabric is a cluster of three nodes, each with pods and a client, and an API server.
type fabric struct {
	t          *testing.T
	api        *apitest.Server
	nodes      []*fabricNode
	hub        *netns.NS // between the nodes
	prestop    string    // the program, when it is built
	built      sync.Once
	kubeconfig string // for pods
	flows      atomic.Uint32

	mu        sync.Mutex // guards all below
	endpoints []discovery.Endpoint
	added     int
	marked    map[string]string // by pod: the version in which it ends
}

type fabricNode struct {
	name, address    string
	ns, pods, client *netns.NS
	line             *line
	proxy            *proxyProcess
}

const fabricVIP = "10.96.0.80:80"

// newFabric starts everything but the pods. What the API server says comes late to the last node. flags are more
// flags of each nodeproxy.
func newFabric(t *testing.T, late time.Duration, flags ...func() []string) *fabric {
	t.Helper()
	f := &fabric{t: t, marked: map[string]string{}, api: apitest.New(t, apitest.Options{}), prestop: filepath.Join(t.TempDir(), "prestop")}
	hub := netnstest.New(t)
	f.hub = hub
	netnstest.Check(t, hub.Forward())
	f.serve()
	to := strings.TrimPrefix(f.api.URL(), "http://")
	for i := 1; i <= 3; i++ {
		n := &fabricNode{name: "node-" + strconv.Itoa(i), address: fmt.Sprintf("172.20.%d.2", i), ns: netnstest.New(t), pods: netnstest.New(t), client: netnstest.New(t)}
		netnstest.Check(t, n.ns.Forward())
		uplink := fmt.Sprintf("172.20.%d.1", i)
		cable := func(a *netns.NS, link, aAddr string, b *netns.NS, bAddr string) {
			netnstest.Check(t, netns.Connect(netns.Plug{NS: a, Link: link, Addrs: []netip.Prefix{netip.MustParsePrefix(aAddr)}},
				netns.Plug{NS: b, Link: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix(bAddr)}}))
			netnstest.Check(t, b.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix(aAddr).Addr()))
		}
		cable(hub, n.name, uplink+"/24", n.ns, n.address+"/24")
		cable(n.ns, "pods", fmt.Sprintf("10.244.%d.1/24", i), n.pods, fmt.Sprintf("10.244.%d.2/24", i))
		cable(n.ns, "client", fmt.Sprintf("10.245.%d.1/24", i), n.client, fmt.Sprintf("10.245.%d.2/24", i))
		netnstest.Check(t, n.pods.AddRange(netip.MustParsePrefix(fmt.Sprintf("10.244.%d.128/25", i)))) // of the pods
		for _, network := range []string{"10.244.%d.0/24", "10.245.%d.0/24"} {
			netnstest.Check(t, hub.AddRoute(netip.MustParsePrefix(fmt.Sprintf(network, i)), netip.MustParseAddr(n.address)))
		}
		f.api.Put(t, &v1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{v1.LabelTopologyZone: endings.Zone(n.name)}},
			Status:     v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: n.address}}},
		})
		delay := time.Duration(0)
		if i == 3 {
			delay = late
		}
		n.line = newLine(t, hub, uplink+":6443", to, delay)
		args := []string{
			"--master=http://" + uplink + ":6443", "--hostname-override=" + n.name, "--healthz-bind-address=0.0.0.0:10256",
			"--cluster-cidr=10.244.0.0/15", "--state-dir=" + t.TempDir(),
		}
		for _, more := range flags {
			args = append(args, more()...)
		}
		n.proxy = start(t, n.ns, args...)
		f.nodes = append(f.nodes, n)
	}
	newLine(t, hub, "172.20.1.1:6444", to, 0)
	text, err := os.ReadFile(f.api.Kubeconfig(t))
	netnstest.Check(t, err)
	f.kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	netnstest.Check(t, os.WriteFile(f.kubeconfig, []byte(strings.ReplaceAll(string(text), f.api.URL(), "http://172.20.1.1:6444")), 0o600))
	return f
}

// buildHook builds the program.
func (f *fabric) buildHook() {
	f.t.Helper()
	build := exec.CommandContext(f.t.Context(), "go", "build", "-o", f.prestop, "../../examples/prestop")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		f.t.Fatalf("build: %v\n%s", err, out)
	}
}

// serve writes the Service.
func (f *fabric) serve(options ...proxiertest.ServiceOption) {
	f.t.Helper()
	f.api.Put(f.t, proxiertest.Service("shop", "web", append(options, proxiertest.ClusterIPs("10.96.0.80"), proxiertest.Port("http", v1.ProtocolTCP, 80))...))
}

// fabricPod is a server at an address of its own. It ends as good servers do: it accepts what is
// queued, and answers what it has accepted.
type fabricPod struct {
	name, address string
	node          *fabricNode
	listener      *net.TCPListener
	serving       sync.WaitGroup
}

// add starts a pod, and makes it a ready endpoint.
func (f *fabric) add() *fabricPod {
	f.t.Helper()
	const addresses = 120
	i := f.added
	f.added++
	n := f.nodes[i%len(f.nodes)]
	p := &fabricPod{name: fmt.Sprintf("web-%d", i), address: fmt.Sprintf("10.244.%d.%d", i%len(f.nodes)+1, 128+i%addresses), node: n}
	l, err := n.pods.Listen(f.t.Context(), "tcp", p.address+":8080")
	netnstest.Check(f.t, err)
	p.listener, _ = l.(*net.TCPListener)
	p.serving.Go(p.serve)
	f.t.Cleanup(func() { _ = p.listener.Close(); p.serving.Wait() })
	f.change(func(all []discovery.Endpoint) []discovery.Endpoint {
		ready, ending := true, false
		return append(all, discovery.Endpoint{
			Addresses: []string{p.address}, NodeName: &n.name, TargetRef: &v1.ObjectReference{Kind: "Pod", Name: p.name},
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &ready, Terminating: &ending},
		})
	})
	return p
}

func (p *fabricPod) serve() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.serving.Go(func() {
			defer conn.Close()
			if _, err := bufio.NewReader(conn).ReadString('\n'); err == nil {
				_, _ = io.WriteString(conn, p.name+"\n")
			}
		})
	}
}

func (p *fabricPod) end(grace time.Duration) {
	_ = p.listener.SetDeadline(time.Now().Add(grace))
	p.serving.Wait()
	_ = p.listener.Close()
}

// change changes the EndpointSlice of the Service, as the controller does.
func (f *fabric) change(edit func([]discovery.Endpoint) []discovery.Endpoint) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.endpoints = edit(slices.Clone(f.endpoints))
	s := proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080))
	s.Endpoints = f.endpoints
	f.api.Put(f.t, s)
}

func (f *fabric) terminating(p *fabricPod) {
	f.change(func(all []discovery.Endpoint) []discovery.Endpoint {
		for i := range all {
			if all[i].TargetRef.Name == p.name {
				ready, ending := false, true
				all[i].Conditions.Ready, all[i].Conditions.Terminating = &ready, &ending
			}
		}
		return all
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.marked[p.name] = strconv.FormatUint(f.api.Version(), 10)
}

// left returns the version in which a pod ends.
func (f *fabric) left(p *fabricPod) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.marked[p.name]
}

func (f *fabric) remove(p *fabricPod) {
	f.change(func(all []discovery.Endpoint) []discovery.Endpoint {
		return slices.DeleteFunc(all, func(e discovery.Endpoint) bool { return e.TargetRef.Name == p.name })
	})
}

// behind returns why a node does not have the EndpointSlice of a version.
func (f *fabric) behind(n *fabricNode, version string) error {
	return f.lacks(n, programmed.ServiceChange{Versions: changetracker.Versions{EndpointSlices: version}})
}

// lacks returns why a node does not have a Change.
func (f *fabric) lacks(n *fabricNode, change programmed.ServiceChange) error {
	ask := programmed.OverHTTP(n.proxy.client(), func(string) string { return "http://127.0.0.1:10256/programmed" })
	report, err := ask(f.t.Context(), n.name, change)
	if err != nil {
		return err
	}
	return report.Missing(change)
}

// follow waits until nodes have everything.
func (f *fabric) follow(nodes ...*fabricNode) {
	f.t.Helper()
	version := strconv.FormatUint(f.api.Version(), 10)
	for _, n := range nodes {
		poll.Nil(f.t, n.name+" follows", func() error { return f.behind(n, version) })
	}
}

// hook runs the program in a pod. It returns what it says, and its exit status.
func (f *fabric) hook(p *fabricPod, deadline time.Duration) (says string, status int) {
	f.t.Helper()
	f.built.Do(f.buildHook)
	hook := exec.Command(f.prestop, "--kubeconfig="+f.kubeconfig, "--deadline="+deadline.String())
	hook.Env = []string{"POD_NAME=" + p.name, "POD_NAMESPACE=shop", "POD_IPS=" + p.address}
	var output strings.Builder
	hook.Stderr = &output
	netnstest.Check(f.t, p.node.pods.Do(hook.Start))
	_ = hook.Wait() // the exit status says it
	return output.String(), hook.ProcessState.ExitCode()
}

// load opens connections all the time, from the clients of all nodes.
type load struct {
	made, failed atomic.Int64
	first        atomic.Pointer[string] // the first failure
	stop         chan struct{}
	working      sync.WaitGroup
	began        time.Time
}

func (f *fabric) load(perSecond int) *load {
	const workers = 4
	l := &load{stop: make(chan struct{}), began: time.Now()}
	pause := time.Second * time.Duration(workers*len(f.nodes)) / time.Duration(perSecond)
	for _, n := range f.nodes {
		for range workers {
			l.working.Go(func() { l.work(f.t, n, pause) })
		}
	}
	return l
}

func (l *load) work(t *testing.T, n *fabricNode, pause time.Duration) {
	_ = n.client.Do(func() error {
		tick := time.NewTicker(pause)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-l.stop:
				return nil
			}
			l.made.Add(1)
			if err := connect(t.Context()); err != nil {
				l.failed.Add(1)
				text := n.name + ": " + err.Error()
				l.first.CompareAndSwap(nil, &text)
			}
		}
	})
}

// connect opens a connection from the namespace of the thread, and wants an answer.
func connect(ctx context.Context) error {
	dialer := net.Dialer{Timeout: exchangeTimeout}
	dialer.SetMultipathTCP(false)
	conn, err := dialer.DialContext(ctx, "tcp", fabricVIP)
	if err != nil {
		return err
	}
	defer conn.Close()
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // the kernel forgets it soon
	}
	if err := conn.SetDeadline(time.Now().Add(exchangeTimeout)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("?\n")); err != nil {
		return err
	}
	_, err = bufio.NewReader(conn).ReadString('\n')
	return err
}

// end stops the load, and returns how many connections were made, how many failed, and a failure.
func (l *load) end() (made, failed int64, first string) {
	close(l.stop)
	l.working.Wait()
	if text := l.first.Load(); text != nil {
		first = *text
	}
	return l.made.Load(), l.failed.Load(), first
}

// replace replaces pods, one after the other, as a Deployment without unavailable pods does. The
// controller marks a pod that ends a while later.
func (f *fabric) replace(pods []*fabricPod, preStop func(*fabricPod), grace time.Duration) (replaced []*fabricPod) {
	f.t.Helper()
	const controller = 100 * time.Millisecond
	for _, old := range pods {
		replaced = append(replaced, f.add())
		var marking sync.WaitGroup
		marking.Go(func() {
			<-time.After(controller)
			f.terminating(old)
		})
		preStop(old)
		old.end(grace)
		marking.Wait()
		f.remove(old)
	}
	return replaced
}

// rolls are the variants of a preStop hook, by name.
func (f *fabric) rolls(sleep time.Duration) map[string]func(*fabricPod) {
	return map[string]func(*fabricPod){
		"none":                    func(*fabricPod) {},
		"sleep " + sleep.String(): func(*fabricPod) { <-time.After(sleep) },
		"prestop": func(p *fabricPod) {
			if says, status := f.hook(p, 10*time.Minute); status != 0 {
				f.t.Errorf("the hook of %s ended with %d: %s", p.name, status, says)
			}
			for _, n := range f.nodes {
				if why := f.behind(n, f.left(p)); why != nil {
					f.t.Errorf("the hook of %s has ended, but %s is behind: %v", p.name, n.name, why)
				}
			}
		},
	}
}

// fullRolling is the environment variable that has the update measured as docs/PROGRAMMED.md shows it.
const fullRolling = "SERVICEPLANE_ROLLING"

// endWithACutOffNode ends a pod while node-2 is cut off and node-3 is late: the hook waits for node-3,
// and names node-2 alone at the deadline. When node-2 is back, the hook ends.
func (f *fabric) endWithACutOffNode(pod *fabricPod, grace time.Duration) {
	f.t.Helper()
	const deadline = 20 * time.Second // enough on a busy machine to ask the others
	f.nodes[1].line.cut()
	f.terminating(pod)
	says, status := f.hook(pod, deadline)
	f.t.Logf("with node-2 cut off and node-3 late, the hook ended with %d: %s", status, says)
	if want := "node node-2: IPv4: EndpointSlices are those of version "; status != 1 || !strings.Contains(says, want) || strings.Contains(says, "node-1") || strings.Contains(says, "node-3") {
		f.t.Errorf("the hook ended with %d and %q, want 1 and %q alone", status, says, want)
	}
	if why := f.behind(f.nodes[2], f.left(pod)); why != nil {
		f.t.Errorf("the hook does not name node-3, which is behind: %v", why)
	}
	f.nodes[1].line.open()
	if says, status := f.hook(pod, 10*time.Minute); status != 0 {
		f.t.Errorf("the hook ended with %d after node-2 came back: %s", status, says)
	}
	pod.end(grace)
	f.remove(pod)
}

// A rolling update under new connections: with the hook none fails, and the node that is late is
// waited for. At the end another node is cut off besides. In its full form, other variants are
// measured too.
func TestARollingUpdateLosesNoConnection(t *testing.T) {
	t.Parallel()
	skipInVM(t)
	pods, perSecond, late, grace, variants := 3, 60, 300*time.Millisecond, 500*time.Millisecond, []string{"prestop"}
	full := os.Getenv(fullRolling) == "1"
	if full {
		pods, perSecond, late, grace, variants = 20, 500, time.Second, 50*time.Millisecond, []string{"none", "sleep 15s", "prestop"}
	}
	f := newFabric(t, late)
	var all []*fabricPod
	for range pods {
		all = append(all, f.add())
	}
	f.follow(f.nodes...)
	const sleep = 15 * time.Second
	took := map[string]time.Duration{}
	for policy, options := range map[string][]proxiertest.ServiceOption{"Cluster": nil, "Local": {proxiertest.InternalPolicyLocal()}} {
		f.serve(options...) // a pod is replaced on its node, so that each node has one always
		version := strconv.FormatUint(f.api.Version(), 10)
		for _, n := range f.nodes {
			poll.Nil(t, n.name+" has the policy", func() error {
				return f.lacks(n, programmed.ServiceChange{Versions: changetracker.Versions{Services: version}})
			})
		}
		for _, name := range variants {
			l := f.load(perSecond)
			began := time.Now()
			all = f.replace(all, f.rolls(sleep)[name], grace)
			took[name] = time.Since(began)
			f.follow(f.nodes...)
			made, failed, first := l.end()
			t.Logf("| %s | %s | %d | %d | %.1f s |", policy, name, made, failed, took[name].Seconds())
			if name != "none" && failed > 0 {
				t.Errorf("%s: %d of %d connections failed, want none: %s", name, failed, made, first)
			}
			if made == 0 || full && name == "none" && failed == 0 {
				t.Errorf("%s: %d connections, %d failed, want some", name, made, failed)
			}
		}
	}
	f.serve()
	l := f.load(perSecond)
	f.endWithACutOffNode(all[0], grace)
	f.follow(f.nodes...)
	if made, failed, first := l.end(); made == 0 || failed > 0 {
		t.Errorf("with a node cut off: %d of %d connections failed, want none: %s", failed, made, first)
	} else {
		t.Logf("with a node cut off: %d connections, none failed", made)
	}
	if full && took["sleep 15s"] < 5*took["prestop"] {
		t.Errorf("the update took %v, want at least five times less than with the sleep", took)
	}
}

// A node that is cut off from the API server is named at the deadline.
func TestACutOffNodeIsNamed(t *testing.T) {
	t.Parallel()
	skipInVM(t)
	f := newFabric(t, 0)
	old := f.add()
	f.add()
	f.follow(f.nodes...)
	f.nodes[2].line.cut()
	f.terminating(old)
	f.follow(f.nodes[:2]...)
	const deadline = 20 * time.Second // enough on a busy machine to ask the others
	says, status := f.hook(old, deadline)
	if want := "node node-3: IPv4: EndpointSlices are those of version "; status != 1 || !strings.Contains(says, want) || strings.Contains(says, "node-1") || strings.Contains(says, "node-2") {
		t.Errorf("the hook ended with %d and %q, want 1 and %q alone", status, says, want)
	}
	if err := f.behind(f.nodes[2], strconv.FormatUint(f.api.Version(), 10)); err == nil {
		t.Error("the node that is cut off has the change")
	}
}

func skipInVM(t *testing.T) {
	t.Helper()
	if inVM() {
		t.Skip("the machine has no Go to build the hook")
	}
}
