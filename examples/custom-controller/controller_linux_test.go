package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxiertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestConnectionsFollowTheFile: an endpoint is replaced, an invalid file changes nothing,
// and a Service is deleted.
func TestConnectionsFollowTheFile(t *testing.T) {
	world := proxiertest.NewTopology(t)
	file := filepath.Join(t.TempDir(), "services")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	line := func(pod *proxiertest.Host) string {
		return fmt.Sprintf("web 10.96.0.10:80 %v\n", netip.AddrPortFrom(pod.Addr(v1.IPv4Protocol), 8080))
	}
	ask := func() string {
		answer, err := world.Client.Ask(t.Context(), "tcp", netip.MustParseAddrPort("10.96.0.10:80"), proxiertest.AskOptions{Timeout: time.Second})
		if err != nil {
			return ""
		}
		return answer.Server
	}
	eventually := func(want string) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ask() != want; <-time.After(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%q answers, want %q", ask(), want)
			}
		}
	}
	write(line(world.LocalPods[0]))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, file, world.Config(), zap.NewNop()) }()
	eventually(world.LocalPods[0].Name)
	write(line(world.LocalPods[1]))
	eventually(world.LocalPods[1].Name)
	write("web 10.96.0.10:80 nonsense\n")
	for range 5 {
		if got := ask(); got != world.LocalPods[1].Name {
			t.Errorf("with an invalid file %q answers, want %q", got, world.LocalPods[1].Name)
		}
	}
	write("")
	eventually("")
	stop()
	if err := <-ended; err != nil {
		t.Errorf("run = %v, want nil", err)
	}
}
