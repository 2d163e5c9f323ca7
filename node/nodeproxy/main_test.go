package nodeproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

// built is the directory of the program, if a test has built it.
var built string

// asProgram makes the tests the program itself, where nothing can build it.
const asProgram = "SERVICEPLANE_TEST_IS_NODEPROXY"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		beTheProgram()
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(built); err != nil {
			fmt.Fprintln(os.Stderr, "remove the program:", err)
		}
		os.Exit(code)
	}))
}

// beTheProgram is nodeproxy.
func beTheProgram() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := Run(ctx, Options{OwnsProcess: true}, os.Args[1:]...); err != nil {
		fmt.Fprintln(os.Stderr, "nodeproxy:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// execute runs the command with its arguments. It prints the help to out.
func execute(ctx context.Context, args []string, out io.Writer) error {
	command := New(Options{OwnsProcess: true})
	command.SetArgs(args)
	command.SetOut(out)
	return command.ExecuteContext(ctx)
}

// All errors of a command line are reported (VAL-01 to VAL-06), each with the flag, its value and the allowed
// values.
func TestAllErrorsOfACommandLineAreReported(t *testing.T) {
	args := []string{
		"--proxy-mode=bpf", "--ebpf-mode=faster", "--ebpf-cgroups=kubepods", "--ebpf-bpffs=bpf", "--ebpf-only-namespaces=netns", "--ebpf-skip-namespaces=/mesh", "--ebpf-forward-peers=[", "--foo", "bar", "-x", "surplus", "--masquerade-all=maybe", "--nftables-masquerade-bit", "32",
		"--nftables-sync-period=soon", "--hostname-override", " ", "--cluster-cidr=10.0.0.0/8,10.1.0.0/16", "--healthz-bind-address=localhost:1",
		"--metrics-bind-address=127.0.0.1:0", "--conntrack-udp-timeout=10ms", "--conntrack-min=-1", "--nodeport-addresses=primary,10.0.0.0",
		"--manifests=/x", "--kubeconfig=/y", "--master=z", "--instance=Not_This", "-v", "-1", "--state-dir=",
	}
	err := execute(t.Context(), args, nil)
	if err == nil {
		t.Fatal("execute = nil, want an error")
	}
	for _, want := range []string{
		"--proxy-mode=bpf: want nftables, iptables, ipvs, ebpf or userspace",
		"--ebpf-mode=faster: want strict or fast",
		"--ebpf-cgroups=[kubepods]: want absolute paths",
		"--ebpf-bpffs=bpf: want an absolute path",
		"--ebpf-only-namespaces=netns: want an absolute path",
		"--ebpf-skip-namespaces=/mesh: want an absolute path, or nothing; nothing beside --ebpf-only-namespaces",
		"--ebpf-forward-peers=[: want patterns",
		"--ebpf-forward-peers=[[]: want nothing without --ebpf-forward-devices",
		"--foo: no such flag",
		"-x: no such flag",
		"--masquerade-all=maybe: want a value of type bool",
		"--nftables-masquerade-bit=32: want 0 to 31",
		"--nftables-sync-period=soon: want a value of type duration",
		"--hostname-override= : want a name",
		"--cluster-cidr=10.0.0.0/8,10.1.0.0/16: want a range such as 10.244.0.0/16, or one of each IP family",
		"--healthz-bind-address=localhost:1: want an IP address",
		"--metrics-bind-address=127.0.0.1:0: want an IP address",
		"--conntrack-udp-timeout=10ms: want 0, or 1s and more",
		"--conntrack-min=-1: want 0 or more",
		"--nodeport-addresses=primary,10.0.0.0: want ranges such as 192.0.2.0/24, primary, localhost or all",
		"--kubeconfig=/y: want nothing beside --manifests",
		"--master=z: want nothing beside --manifests",
		"--instance=Not_This: want 1 to 7 lower-case letters",
		"--v=-1: want 0 or more",
		"--state-dir=: want a directory",
	} {
		if n := strings.Count(err.Error(), want); n != 1 {
			t.Errorf("%d times %q in the error, want it once", n, want)
		}
	}
	if got := strings.Count(err.Error(), "\n"); got != 25 {
		t.Errorf("%d errors, want 25", got)
	}
	if t.Failed() {
		t.Log(err)
	}
}

func TestHelpListsTheFlags(t *testing.T) {
	var out bytes.Buffer
	if err := execute(t.Context(), []string{"--help"}, &out); err != nil {
		t.Fatalf("execute: %v", err)
	}
	for _, want := range []string{"--nftables-masquerade-bit int", "(default 14)", "--cleanup", "--manifests"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("help is\n%s\nwant %q in it", &out, want)
		}
	}
}

// The version is printed with the version of Go.
func TestTheVersionIsPrinted(t *testing.T) {
	var out bytes.Buffer
	if err := execute(t.Context(), []string{"--version"}, &out); err != nil {
		t.Fatalf("execute: %v", err)
	}
	if !strings.HasPrefix(out.String(), "nodeproxy version ") || !strings.Contains(out.String(), runtime.Version()) || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("--version prints %q, want one line with the versions of nodeproxy and Go", out.String())
	}
}

func TestAFailedTaskEndsAll(t *testing.T) {
	broken := errors.New("broken")
	tasks := []task{
		{"waiting", func(ctx context.Context) error { <-ctx.Done(); return nil }},
		{"failing", func(context.Context) error { return broken }},
	}
	err := runAll(t.Context(), tasks)
	if !errors.Is(err, broken) || err.Error() != "run failing: broken" {
		t.Errorf("runAll = %v, want %q", err, "run failing: broken")
	}
}

func TestTasksEndWithTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		ended := 0
		wait := func(ctx context.Context) error { <-ctx.Done(); ended++; return nil }
		if err := runAll(ctx, []task{{"one", wait}}); err != nil || ended != 1 {
			t.Errorf("runAll = %v with %d ended tasks, want nil with 1", err, ended)
		}
	})
}
