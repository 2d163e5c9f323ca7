package userspace

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeNetsh is a script that records its arguments, one call per line. It keeps the
// addresses in a file.
type fakeNetsh struct {
	dir       string
	localCall int
	late      int // how many calls of local do not list a new address
}

// newFakeNetsh writes the script, which ends with the line last.
func newFakeNetsh(t *testing.T, last string) *fakeNetsh {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("the stand-in for netsh is a script of a Unix shell")
	}
	f := &fakeNetsh{dir: t.TempDir()}
	script := `#!/bin/sh
here=$(dirname "$0")
line=
for argument in "$@"; do
	line="$line|$argument"
	case $argument in address=*) address=${argument#address=} ;; esac
done
echo "$line" >>"$here/calls"
case $3 in
add) echo "${address%/128}" >>"$here/addresses" ;;
delete)
	grep -vxF "$address" "$here/addresses" >"$here/left"
	mv "$here/left" "$here/addresses"
	;;
esac
` + last
	if err := os.WriteFile(f.command(), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fakeNetsh) command() string { return filepath.Join(f.dir, "netsh") }

func (f *fakeNetsh) lines(name string) []string {
	text, _ := os.ReadFile(filepath.Join(f.dir, name)) // none yet
	return strings.Fields(strings.ReplaceAll(string(text), " ", "_"))
}

// local does not list new addresses for the first late calls.
func (f *fakeNetsh) local() ([]netip.Addr, error) {
	var addrs []netip.Addr
	for _, line := range f.lines("addresses") {
		addrs = append(addrs, netip.MustParseAddr(line))
	}
	if len(addrs) > 0 && f.localCall < f.late {
		f.localCall++
		return nil, nil
	}
	return addrs, nil
}

func (f *fakeNetsh) have(t *testing.T, addr string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(f.dir, "addresses"), []byte(addr+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (f *fakeNetsh) addresses(timeout time.Duration) Addresses {
	return NewNetsh(NetshOptions{Command: f.command(), Timeout: timeout, Local: f.local})
}

// mustHaveRun compares all calls; spaces within arguments are "_".
func (f *fakeNetsh) mustHaveRun(t *testing.T, want ...string) {
	t.Helper()
	if got := f.lines("calls"); !slices.Equal(got, want) {
		t.Errorf("calls of netsh\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func mustDo(t *testing.T, do func(context.Context, netip.Addr) error, addr string) {
	t.Helper()
	if err := do(t.Context(), netip.MustParseAddr(addr)); err != nil {
		t.Fatalf("%s: %v, want nil", addr, err)
	}
}

const nic = "vEthernet_(HNS_Internal_NIC)"

func TestNetshAddsAndDeletes(t *testing.T) {
	f := newFakeNetsh(t, "")
	a := f.addresses(patience)
	mustDo(t, a.Add, "10.96.0.1")
	mustDo(t, a.Add, "fd00::1")
	mustDo(t, a.Add, "10.96.0.1") // added already
	mustDo(t, a.Remove, "10.96.0.1")
	mustDo(t, a.Remove, "fd00::1")
	mustDo(t, a.Remove, "fd00::1") // removed already
	f.mustHaveRun(t,
		"|interface|ipv4|add|address|name="+nic+"|address=10.96.0.1|mask=255.255.255.255|store=active|skipassource=true",
		"|interface|ipv6|add|address|interface="+nic+"|address=fd00::1/128|store=active|skipassource=true",
		"|interface|ipv4|delete|address|name="+nic+"|address=10.96.0.1",
		"|interface|ipv6|delete|address|interface="+nic+"|address=fd00::1|store=active",
	)
	if left := f.lines("addresses"); len(left) != 0 {
		t.Errorf("addresses %v are left, want none", left)
	}
}

func TestNetshWaitsUntilAnAddressCanBeSeen(t *testing.T) {
	t.Parallel()
	f := newFakeNetsh(t, "")
	f.late = 3
	mustDo(t, f.addresses(patience).Add, "10.96.0.1")
	if f.localCall != f.late {
		t.Errorf("%d calls of Local, want %d", f.localCall, f.late)
	}
	never := newFakeNetsh(t, "")
	never.late = 1 << 30
	err := never.addresses(500*time.Millisecond).Add(t.Context(), netip.MustParseAddr("10.96.0.1"))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "10.96.0.1") {
		t.Errorf("Add = %v, want a deadline, and the address named", err)
	}
}

// An address that exists before is used and not removed.
func TestNetshLeavesAddressesOfOthersAlone(t *testing.T) {
	f := newFakeNetsh(t, "")
	f.have(t, "10.96.0.1")
	a := f.addresses(patience)
	mustDo(t, a.Add, "10.96.0.1")
	mustDo(t, a.Remove, "10.96.0.1")
	f.mustHaveRun(t)
	if left := f.lines("addresses"); !slices.Equal(left, []string{"10.96.0.1"}) {
		t.Errorf("addresses %v, want the one that was there", left)
	}
}

// The address was added although Add failed.
func TestNetshRemovesWhatCameTooLate(t *testing.T) {
	f := newFakeNetsh(t, "")
	f.late = 1 << 30
	a := f.addresses(300 * time.Millisecond)
	if err := a.Add(t.Context(), netip.MustParseAddr("10.96.0.1")); err == nil {
		t.Fatal("Add = nil, want an error: the address is not listed")
	}
	f.late = 0
	mustDo(t, a.Add, "10.96.0.1") // it is there by now, and still ours
	mustDo(t, a.Remove, "10.96.0.1")
	if left := f.lines("addresses"); len(left) != 0 {
		t.Errorf("addresses %v are left, want none", left)
	}
}

// The error has the output of netsh, its exit code and its arguments.
func TestNetshTellsWhatWentWrong(t *testing.T) {
	f := newFakeNetsh(t, "echo 'The requested operation requires elevation.'; exit 1\n")
	f.late = 1 << 30
	err := f.addresses(patience).Add(t.Context(), netip.MustParseAddr("10.96.0.1"))
	for _, want := range []string{"requires elevation", "exit status 1", "address=10.96.0.1"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Add = %v, want %q in it", err, want)
		}
	}
	if err := NewNetsh(NetshOptions{Command: filepath.Join(t.TempDir(), "none"), Local: f.local}).
		Add(t.Context(), netip.MustParseAddr("10.96.0.2")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Add without netsh = %v, want %v", err, os.ErrNotExist)
	}
	broken := errors.New("broken")
	bad := NewNetsh(NetshOptions{Command: f.command(), Local: func() ([]netip.Addr, error) { return nil, broken }})
	if err := bad.Add(t.Context(), netip.MustParseAddr("10.96.0.1")); !errors.Is(err, broken) {
		t.Errorf("Add = %v, want %v", err, broken)
	}
}

// The engines of both IP families may share it.
func TestNetshServesBothFamiliesAtOnce(t *testing.T) {
	f := newFakeNetsh(t, "")
	a := f.addresses(10 * time.Second)
	var adding sync.WaitGroup
	for _, addr := range []string{"10.96.0.1", "fd00:96::1"} {
		adding.Go(func() {
			if err := a.Add(t.Context(), netip.MustParseAddr(addr)); err != nil {
				t.Errorf("Add %s = %v, want nil", addr, err)
			}
		})
	}
	adding.Wait()
	if got := len(f.lines("calls")); got != 2 {
		t.Errorf("%d calls of netsh, want one for each address", got)
	}
}

// Netsh looks at the addresses of this machine by itself.
func TestNetshLooksAtThisMachine(t *testing.T) {
	f := newFakeNetsh(t, "")
	a := NewNetsh(NetshOptions{Command: f.command()})
	mustDo(t, a.Add, "127.0.0.1")
	f.mustHaveRun(t)
}
