package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
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

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// server answers each connection with its name, on loopback.
func server(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, name)
			_ = conn.Close()
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		serving.Wait()
	})
	return netip.MustParseAddrPort(l.Addr().String())
}

// startNginx runs nginx with a file of servers, and returns how to make it read that
// again.
func startNginx(t *testing.T, servers string) (reload func(context.Context) error) {
	t.Helper()
	program, err := exec.LookPath("nginx")
	if err != nil {
		netnstest.Check(t, fmt.Errorf("%w: %w", errors.ErrUnsupported, err))
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
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // ended by a signal
	})
	return func(ctx context.Context) error {
		return exec.CommandContext(ctx, program, "-c", conf, "-e", "stderr", "-s", "reload").Run()
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestNginxFollowsEndpoints: real connections go where the endpoints are, a reload that
// fails is tried again, and SCTP is set aside.
func TestNginxFollowsEndpoints(t *testing.T) {
	const vip = "127.1.96.10" // any address of 127.0.0.0/8 is the machine's
	servers := filepath.Join(t.TempDir(), "services.conf")
	nginxReload := startNginx(t, servers)
	failures := 2
	config := proxier.Config{Tracker: changetracker.Options{LoopbackEndpoints: true}} // the endpoints are sockets of the test
	p, err := newProxy(config, servers, nil, func(ctx context.Context) error {
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
	slice := func(endpoint netip.AddrPort) *discovery.EndpointSlice {
		return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, proxiertest.SlicePort("http", v1.ProtocolTCP, int32(endpoint.Port())),
			proxiertest.Endpoint(endpoint.Addr().String()))
	}
	p.OnServiceAdd(proxiertest.Service("shop", "web", proxiertest.ClusterIPs(vip), proxiertest.Port("http", v1.ProtocolTCP, 18080),
		proxiertest.Port("odd", v1.ProtocolSCTP, 18081)))
	a, b := server(t, "a"), server(t, "b")
	p.OnEndpointSliceAdd(slice(a))
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	eventually(t, vip+":18080", "a")
	p.OnEndpointSliceUpdate(nil, slice(b))
	eventually(t, vip+":18080", "b")
	status := p.Status()
	failed := status.Families[v1.IPv4Protocol].Failed
	if len(failed) != 1 || !errors.Is(failed[0], proxier.ErrNotSupported) || failed[0].Name.Port != "odd" {
		t.Errorf("failed are %v, want the SCTP port", failed)
	}
	if text, err := os.ReadFile(servers); err != nil || !strings.Contains(string(text), "# shop/web:http") {
		t.Errorf("the file holds\n%s, %v, want the Service's name in it", text, err)
	}
}

func eventually(t *testing.T, to, want string) {
	t.Helper()
	got := ""
	for deadline := time.Now().Add(20 * time.Second); got != want; {
		if time.Now().After(deadline) {
			t.Fatalf("%s answers %q, want %q", to, got, want)
		}
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(t.Context(), "tcp", to)
		if err != nil {
			continue
		}
		text, _ := io.ReadAll(conn)
		_ = conn.Close()
		got = string(text)
	}
}
