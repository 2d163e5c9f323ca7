package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// startNginx runs nginx on the node with a file of servers, and returns its reload.
func startNginx(t *testing.T, node *proxiertest.Host, servers string) (reload func(context.Context) error) {
	t.Helper()
	program, err := exec.LookPath("nginx")
	if err != nil && os.Getenv("SERVICEPLANE_REQUIRE_KERNEL") != "1" {
		t.Skip(err)
	}
	version, err := exec.CommandContext(t.Context(), program, "-V").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	load := ""
	if dir := regexp.MustCompile(`--modules-path=(\S+)`).FindSubmatch(version); dir != nil {
		if module := filepath.Join(string(dir[1]), "ngx_stream_module.so"); exists(module) {
			load = "load_module " + module + ";"
		}
	}
	conf := filepath.Join(t.TempDir(), "nginx.conf")
	text := fmt.Sprintf("%s\ndaemon off;\npid %s.pid;\nerror_log stderr crit;\nevents {}\nstream { include %s; }\n", load, conf, servers)
	if err := errors.Join(os.WriteFile(conf, []byte(text), 0o600), os.WriteFile(servers, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "-c", conf, "-e", "stderr")
	cmd.Stderr = os.Stderr
	if err := node.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // the error is the signal
	})
	return func(ctx context.Context) error {
		return exec.CommandContext(ctx, program, "-c", conf, "-e", "stderr", "-s", "reload").Run()
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestNginxFollowsEndpoints: connections reach the endpoints, a failed reload is retried,
// and the SCTP port is reported as failed.
func TestNginxFollowsEndpoints(t *testing.T) {
	network := proxiertest.NewTopology(t)
	vip := netip.AddrPortFrom(network.Node.Addrs[2], 18080) // nginx listens on addresses of the node
	servers := filepath.Join(t.TempDir(), "services.conf")
	nginxReload := startNginx(t, network.Node, servers)
	failures := 2
	p, err := newProxy(network.Config(), servers, nil, func(ctx context.Context) error {
		if failures--; failures >= 0 {
			return errors.New("not now")
		}
		return nginxReload(ctx)
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = p.Run(ctx) })
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	slice := func(pod *proxiertest.Host) *discovery.EndpointSlice {
		return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, 8080),
			proxiertest.Endpoint(pod.Addr(v1.IPv4Protocol).String()))
	}
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs(vip.Addr().String()), proxiertest.Port("http", v1.ProtocolTCP, 18080),
		proxiertest.Port("odd", v1.ProtocolSCTP, 18081)))
	p.OnEndpointSliceAdd(slice(network.LocalPods[0]))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	eventually(t, network.Client, vip, network.LocalPods[0].Name)
	p.OnEndpointSliceUpdate(nil, slice(network.RemotePods[1]))
	eventually(t, network.Client, vip, network.RemotePods[1].Name)
	status := p.Status()
	failed := status.Families[v1.IPv4Protocol].Failed
	if len(failed) != 1 || !errors.Is(failed[0], proxier.ErrNotSupported) || failed[0].Name.Port != "odd" || !failed[0].Terminal {
		t.Errorf("failed are %v, want the SCTP port", failed)
	}
	if text, err := os.ReadFile(servers); err != nil || !strings.Contains(string(text), "# shop/web:http") {
		t.Errorf("the file holds\n%s, %v, want the Service's name in it", text, err)
	}
}

// eventually has a loop of its own: this test could be in another module.
func eventually(t *testing.T, client *proxiertest.Host, to netip.AddrPort, want string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; <-time.After(20 * time.Millisecond) {
		answer, err := client.Ask(t.Context(), "tcp", to, proxiertest.AskOptions{Timeout: time.Second})
		switch {
		case err == nil && answer.Server == want:
			return
		case time.Now().After(end):
			t.Fatalf("%v answers %q, %v; want %q", to, answer.Server, err, want)
		}
	}
}
