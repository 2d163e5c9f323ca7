package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/proxiertest"
)

const module = "github.com/serviceplane/serviceplane"

// newcomer has an empty directory and the go command.
type newcomer struct {
	t      *testing.T
	folder string
}

func (n newcomer) run(command string) string {
	n.t.Helper()
	words := strings.Fields(command)
	cmd := exec.CommandContext(n.t.Context(), words[0], words[1:]...)
	cmd.Dir, cmd.Env = n.folder, append(os.Environ(), "GOFLAGS=", "GOWORK=off")
	out, err := cmd.CombinedOutput()
	if err != nil {
		n.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

// TestANewcomersFirstProgram: outside of the repository, with the steps of the README, a
// program of at most 40 lines proxies a Service.
func TestANewcomersFirstProgram(t *testing.T) {
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if lines := bytes.Count(program, []byte("\n")); lines > 40 {
		t.Errorf("the program has %d lines, want at most 40", lines)
	}
	clone, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	n := newcomer{t: t, folder: t.TempDir()}
	if err := os.WriteFile(filepath.Join(n.folder, "main.go"), program, 0o600); err != nil {
		t.Fatal(err)
	}
	n.run("go mod init example.net/first")
	n.run("go mod edit -require=" + module + "@v0.0.0 -replace=" + module + "=" + clone)
	n.run("go mod tidy")
	n.run("go build -o first .")
	if deps := n.run("go list -deps ."); strings.Contains(deps, "k8s.io/client-go") || strings.Contains(deps, "prometheus") {
		t.Errorf("the program needs more than it imports:\n%s", deps)
	}
	n.proxies("10.96.0.10:80")
}

// proxies runs the program on a node until the Service answers, and wants no rules after
// its end.
func (n newcomer) proxies(service string) {
	n.t.Helper()
	network := proxiertest.NewTopology(n.t)
	err := network.Node.Do(func() error { // the endpoint is an address of the node
		if out, err := exec.CommandContext(n.t.Context(), "ip", "address", "add", "10.244.0.7/32", "dev", "lo").CombinedOutput(); err != nil {
			return fmt.Errorf("add address: %w: %s", err, out)
		}
		endpoint, err := net.Listen("tcp", "10.244.0.7:8080")
		if err == nil {
			n.t.Cleanup(func() { _ = endpoint.Close() })
		}
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	program := exec.Command(filepath.Join(n.folder, "first"))
	program.Stderr = os.Stderr
	if err := network.Node.Do(program.Start); err != nil {
		n.t.Fatal(err)
	}
	connect := func() error {
		return network.Client.Do(func() error {
			conn, err := net.DialTimeout("tcp", service, time.Second)
			if err == nil {
				err = conn.Close()
			}
			return err
		})
	}
	for end := time.Now().Add(time.Minute); ; <-time.After(20 * time.Millisecond) {
		err := connect()
		if err == nil {
			break
		}
		if time.Now().After(end) {
			n.t.Fatalf("no response of the Service: %v", err)
		}
	}
	if err := program.Process.Signal(os.Interrupt); err != nil {
		n.t.Error(err)
	}
	if err := program.Wait(); err != nil {
		n.t.Errorf("the program ends with %v", err)
	}
	if err := connect(); err == nil {
		n.t.Error("the Service still answers, want no rules after the end")
	}
}
