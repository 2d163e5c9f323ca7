package userspace_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
	"github.com/serviceplane/serviceplane/runner"
	"github.com/serviceplane/serviceplane/userspace"
)

const (
	// crowdedNode is the network namespace of TestACrowdLeavesRoomForOthers, in its
	// child process, which may have fewDescriptors.
	crowdedNode       = "SERVICEPLANE_TEST_CROWDED_NODE"
	fewDescriptors    = 1024
	crowdPatience     = 20 * time.Second
	crowds            = 6    // Services whose clients are too many
	crowdDatagrams    = 1000 // UDP clients of each
	crowdConnections  = 600  // idle TCP clients of one Service
	crowdPort         = 8081
	crowdHealthz      = "192.0.2.1:10256"
	crowdEndpoint     = "192.0.2.2" // and address of the many clients
	crowdStranger     = "192.0.2.3" // address of another client
	quietService      = 90
	movedService      = 91
	newService        = 92
	slowService       = 93
	quietDatagrams    = 94
	crowdedDescriptor = 64 // the least number of free descriptors meanwhile
)

// crowdVIP is the ClusterIP of a Service of the test.
func crowdVIP(number int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(number)}), 80)
}

// The process has 1,024 descriptors. The UDP clients of six Services and the idle TCP
// clients of another one could use many times more. All other clients are served, health
// checks work, and changes are programmed.
func TestACrowdLeavesRoomForOthers(t *testing.T) {
	if path := os.Getenv(crowdedNode); path != "" {
		beCrowdedNode(t, path)
		return
	}
	node, away := netnstest.New(t), netnstest.New(t)
	netnstest.Connect(t, node, []string{"192.0.2.1/24"}, away, []string{crowdEndpoint + "/24", crowdStranger + "/24"})
	netnstest.Check(t, away.AddRoute(netip.MustParsePrefix("198.51.100.0/24"), netip.MustParseAddr("192.0.2.1")))
	netnstest.Serve(t, away, "endpoint", crowdPort)
	child := startCrowdedNode(t, node)
	child.tell(t, "add "+fmt.Sprint(quietService))
	reach := func(what, network string, at netip.AddrPort) {
		t.Helper()
		o := netns.AskOptions{Timeout: crowdPatience, From: netip.MustParseAddr(crowdStranger)}
		if _, err := netns.Ask(t.Context(), away, network, at, o); err != nil {
			t.Errorf("%s: %v, want an answer", what, err)
		}
	}
	reach("before", "tcp", crowdVIP(quietService))
	var crowd []net.Conn
	come := func(network string, number, clients int) {
		for range clients {
			conn, err := away.Dial(t.Context(), network, crowdVIP(number).String())
			if err != nil {
				continue // there may be no room
			}
			crowd = append(crowd, conn)
			if network == "udp" {
				_, _ = conn.Write([]byte("hello"))
			}
		}
	}
	leave := func() {
		for _, conn := range crowd {
			_ = conn.Close()
		}
	}
	t.Cleanup(leave)
	come("tcp", slowService, crowdConnections)
	for number := range crowds {
		come("udp", number+1, crowdDatagrams)
	}

	if got := child.healthz(t, away); got != http.StatusOK {
		t.Errorf("status of /healthz %d, want %d", got, http.StatusOK)
	}
	reach("TCP to another Service", "tcp", crowdVIP(quietService))
	reach("UDP to another Service", "udp", crowdVIP(quietDatagrams))
	reach("TCP to the Service with silent clients, from another address", "tcp", crowdVIP(slowService))
	if got := child.tell(t, "move"); got != "done <nil>" {
		t.Errorf("a ClusterIP changes: %s, want done <nil>", got)
	}
	reach("the new ClusterIP", "tcp", crowdVIP(movedService))
	if got := child.tell(t, "add "+fmt.Sprint(newService)); got != "done <nil>" {
		t.Errorf("a Service comes: %s, want done <nil>", got)
	}
	reach("the new Service", "tcp", crowdVIP(newService))
	open, status := child.open(t), child.tell(t, "status")
	if !strings.Contains(status, "Descriptors") || open > fewDescriptors-crowdedDescriptor {
		t.Errorf("%d descriptors are open of %d, and the status is %q; want %d to be free, and a condition", open, fewDescriptors, status, crowdedDescriptor)
	}

	leave()
	child.tell(t, "calm")
	poll.Until(t, "100 open descriptors at most, after the crowd has gone", func() bool { return child.open(t) <= 100 })
	reach("afterwards", "tcp", crowdVIP(quietService))
}

// crowdedChild is the child process.
type crowdedChild struct {
	pid   int
	say   io.Writer
	heard *bufio.Reader
}

func startCrowdedNode(t *testing.T, node *netns.NS) *crowdedChild {
	t.Helper()
	ctx, kill := context.WithCancel(context.Background()) // the child ends with its standard input
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+t.Name()+"$", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), crowdedNode+"="+node.Path())
	cmd.Stderr = os.Stderr
	say, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = say.Close()
		late := time.AfterFunc(crowdPatience, kill)
		said, _ := io.ReadAll(out)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the child: %v\n%s", err, said)
		}
		late.Stop()
		kill()
	})
	c := &crowdedChild{pid: cmd.Process.Pid, say: say, heard: bufio.NewReader(out)}
	c.tell(t, "hello")
	return c
}

// tell sends a command, and returns the answer.
func (c *crowdedChild) tell(t *testing.T, order string) string {
	t.Helper()
	if _, err := fmt.Fprintln(c.say, order); err != nil {
		t.Fatalf("%s: %v", order, err)
	}
	line, err := c.heard.ReadString('\n')
	if err != nil {
		t.Fatalf("%s: answer %q, %v", order, line, err)
	}
	return strings.TrimSpace(line)
}

// open counts the child's descriptors.
func (c *crowdedChild) open(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func (c *crowdedChild) healthz(t *testing.T, from *netns.NS) int {
	t.Helper()
	client := http.Client{Timeout: crowdPatience, Transport: &http.Transport{DisableKeepAlives: true, DialContext: from.Dial}}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+crowdHealthz+healthcheck.HealthzPath, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := client.Do(r)
	if err != nil {
		t.Errorf("/healthz: %v", err)
		return 0
	}
	defer answer.Body.Close()
	return answer.StatusCode
}

// beCrowdedNode runs the child: a proxy that obeys commands.
func beCrowdedNode(t *testing.T, path string) {
	limit := unix.Rlimit{Cur: fewDescriptors, Max: fewDescriptors}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	config := userspace.Config{
		Config: proxier.Config{
			Families: []v1.IPFamily{v1.IPv4Protocol}, NetNS: path, Runner: runner.Options{MinInterval: runner.Unlimited},
			Node: changetracker.Node{Name: "node", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}},
		},
		UDPIdle: time.Minute,
	}
	config.Portals = func(family v1.IPFamily) (proxier.Engine, error) {
		return nftables.NewEngine(nftables.Config{Config: config.Config}, family, proxier.Deps{})
	}
	p, err := userspace.New(config, proxier.Deps{Health: proxier.NoHealth()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- p.Run(ctx) }()
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", crowdHealthz)
	if err != nil {
		t.Fatal(err)
	}
	server := http.Server{Handler: healthcheck.NewHandler(p.Status, healthcheck.HandlerOptions{}), ReadHeaderTimeout: time.Minute}
	go func() { ended <- server.Serve(l) }()
	for number := range crowds {
		addCrowded(p, number+1, v1.ProtocolUDP)
	}
	addCrowded(p, quietDatagrams, v1.ProtocolUDP)
	addCrowded(p, slowService, v1.ProtocolTCP)
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	for orders := bufio.NewScanner(os.Stdin); orders.Scan(); {
		obeyCrowded(t, p, orders.Text())
	}
	stop()
	_ = server.Close()
	<-ended
	<-ended
	if err := p.Cleanup(context.Background()); err != nil {
		t.Error(err)
	}
}

// crowdedService is a Service of the test; at is the number of its ClusterIP.
func crowdedService(number, at int, protocol v1.Protocol) *v1.Service {
	return proxiertest.Service("test", fmt.Sprint("s", number), proxiertest.ClusterIPs(crowdVIP(at).Addr().String()), proxiertest.Port("main", protocol, 80))
}

func addCrowded(p proxier.Provider, number int, protocol v1.Protocol) {
	p.OnServiceAdd(crowdedService(number, number, protocol))
	p.OnEndpointSliceAdd(proxiertest.Slice("test", fmt.Sprint("s", number), discovery.AddressTypeIPv4,
		proxiertest.SlicePort("main", protocol, crowdPort), proxiertest.Endpoint(crowdEndpoint)))
}

func obeyCrowded(t *testing.T, p proxier.Provider, order string) {
	t.Helper()
	var number int
	switch _, err := fmt.Sscanf(order, "add %d", &number); {
	case err == nil:
		addCrowded(p, number, v1.ProtocolTCP)
	case order == "move":
		p.OnServiceUpdate(crowdedService(quietService, quietService, v1.ProtocolTCP), crowdedService(quietService, movedService, v1.ProtocolTCP))
	case order == "calm":
		for n := range crowds {
			p.OnServiceDelete(crowdedService(n+1, n+1, v1.ProtocolUDP))
		}
		p.OnServiceUpdate(nil, crowdedService(quietService, quietService, v1.ProtocolTCP))
	case order == "status":
		s := p.Status()
		fmt.Println(s.Conditions, s.Families[v1.IPv4Protocol].LastError)
		return
	}
	ctx, stop := context.WithTimeout(t.Context(), crowdPatience)
	defer stop()
	fmt.Println("done", p.Sync(ctx))
}
