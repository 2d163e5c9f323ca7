package netnstest

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/internal/netns"
)

// RequireKernel is an environment variable. If it is 1, tests that would be skipped fail,
// so that a CI machine without privileges does not pass.
const RequireKernel = "SERVICEPLANE_REQUIRE_KERNEL"

// New returns a network namespace that ends with the test. Without the privilege to
// create one, the test is skipped, or fails if RequireKernel is set. Its connection tracking
// soon forgets TCP connections that both ends have closed: the kernel has one table for all
// namespaces, and each cleaning of stale flows would read those of two minutes.
func New(tb testing.TB) *netns.NS {
	tb.Helper()
	ns, err := netns.New()
	Check(tb, err)
	tb.Cleanup(func() {
		if err := ns.Close(); err != nil {
			tb.Errorf("close network namespace: %v", err)
		}
	})
	for _, state := range []string{"time_wait", "close", "last_ack"} {
		if err := setTimeout(ns, "tcp_timeout_"+state, 5*time.Second); err != nil && !errors.Is(err, fs.ErrNotExist) { // without the module
			Check(tb, err)
		}
	}
	return ns
}

func setTimeout(ns inside, name string, timeout time.Duration) error {
	return ns.Do(func() error {
		return os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_"+name, strconv.AppendInt(nil, int64(timeout/time.Second), 10), 0)
	})
}

// Check fails the test if err is not nil. If privileges are missing and RequireKernel is
// not set, it skips the test.
func Check(tb testing.TB, err error) {
	tb.Helper()
	switch {
	case err == nil:
	case errors.Is(err, netns.ErrPrivilege) && os.Getenv(RequireKernel) != "1":
		tb.Skipf("needs network namespaces: %v", err)
	default:
		tb.Fatalf("build network: %v", err)
	}
}

// inside is a namespace, or a host that is one.
type inside interface{ Do(f func() error) error }

// Run runs a program in a namespace, and returns what it prints. The test fails if the program does.
func Run(tb testing.TB, ns inside, program string, args ...string) string {
	tb.Helper()
	var out []byte
	err := ns.Do(func() (err error) {
		out, err = exec.Command(program, args...).CombinedOutput()
		return err
	})
	if err != nil {
		tb.Fatalf("%s %v: %v\n%s", program, args, err, out)
	}
	return string(out)
}

// ForgetSoon makes the connection tracking of a namespace forget TCP connections that ended, or
// were not answered, a second ago, and flows of UDP after a time of silence, so that no test waits for minutes.
func ForgetSoon(tb testing.TB, ns inside, udp time.Duration) {
	tb.Helper()
	timeouts := map[string]time.Duration{"udp_timeout": udp, "udp_timeout_stream": udp}
	for _, state := range []string{"syn_sent", "syn_recv", "time_wait", "close", "last_ack", "fin_wait", "close_wait"} {
		timeouts["tcp_timeout_"+state] = time.Second
	}
	for name, timeout := range timeouts {
		Check(tb, setTimeout(ns, name, timeout))
	}
}

// Connect creates a cable between two namespaces. Addresses are written as
// "192.0.2.1/24".
func Connect(tb testing.TB, a *netns.NS, aAddrs []string, b *netns.NS, bAddrs []string) {
	tb.Helper()
	Check(tb, netns.Connect(
		netns.Plug{NS: a, Link: "eth0", Addrs: prefixes(aAddrs)},
		netns.Plug{NS: b, Link: "eth0", Addrs: prefixes(bAddrs)}))
}

// Serve starts a netns.Server that ends with the test.
func Serve(tb testing.TB, ns *netns.NS, name string, ports ...uint16) *netns.Server {
	tb.Helper()
	server, err := netns.Serve(tb.Context(), ns, name, ports...)
	Check(tb, err)
	tb.Cleanup(func() {
		if err := server.Close(); err != nil {
			tb.Errorf("close server %s: %v", name, err)
		}
	})
	return server
}

func prefixes(texts []string) []netip.Prefix {
	parsed := make([]netip.Prefix, len(texts))
	for i, text := range texts {
		parsed[i] = netip.MustParsePrefix(text)
	}
	return parsed
}

// KernelBefore reports whether the kernel is older than a release.
func KernelBefore(tb testing.TB, major, minor int) bool {
	tb.Helper()
	var isMajor, isMinor int
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	Check(tb, err)
	_, err = fmt.Sscanf(string(release), "%d.%d", &isMajor, &isMinor)
	Check(tb, err)
	return isMajor < major || isMajor == major && isMinor < minor
}
