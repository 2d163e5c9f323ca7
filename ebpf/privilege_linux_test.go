package ebpf_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// privileged is what a process without some privileges does, and what came of it.
type privileged struct {
	BPFFS, Cgroup string
	UDP, Forward  bool

	Conditions []string
	Sockets    bool // are translated
	Forwards   bool
	Why        string // not
}

const privilegeVariable = "SERVICEPLANE_TEST_PRIVILEGE"

// TestWithoutPrivilege runs this program with few capabilities, in the network namespace of a node. What the engine
// needs is what docs/FASTPATHS.md says; without it, a Condition names it, and rules do everything.
func TestWithoutPrivilege(t *testing.T) {
	t.Parallel()
	if text := os.Getenv(privilegeVariable); text != "" {
		syncOnce(t, text)
		return
	}
	world := proxiertest.NewTopology(t)
	lacksForUDP := map[bool]string{true: "BPF iterators"}[udpIsForbidden(t)]
	for name, c := range map[string]struct {
		capabilities string
		does         privileged
		lacks        string // as the Condition says
		sockets      bool   // are translated
	}{
		"rules alone":      {"net_admin", privileged{}, "CAP_BPF", false},
		"sockets":          {"net_admin,bpf", privileged{}, "", true},
		"UDP, not allowed": {"net_admin,bpf", privileged{UDP: true}, "CAP_SYS_ADMIN", false},
		"UDP":              {"net_admin,sys_admin", privileged{UDP: true}, lacksForUDP, true},
		"forwarding":       {"net_admin,bpf,perfmon", privileged{Forward: true}, "", true},
		"sockets alone":    {"net_admin,bpf", privileged{Forward: true}, "", true},
		"nothing":          {"net_admin", privileged{Forward: true}, "CAP_BPF", false},
	} {
		t.Run(name, func(t *testing.T) {
			s := sockets(t)
			c.does.BPFFS, c.does.Cgroup = s.BPFFS, s.Cgroups[0]
			text, err := json.Marshal(c.does)
			netnstest.Check(t, err)
			var out []byte
			netnstest.Check(t, world.Node.Do(func() error {
				command := exec.CommandContext(t.Context(), "setpriv", "--bounding-set=-all,+"+strings.ReplaceAll(c.capabilities, ",", ",+"), "--inh-caps=-all",
					os.Args[0], "-test.run=^TestWithoutPrivilege$", "-test.v")
				command.Env = append(os.Environ(), privilegeVariable+"="+string(text))
				var err error
				out, err = command.CombinedOutput()
				return err
			}))
			var got privileged
			_, answer, _ := strings.Cut(string(out), "ANSWER ")
			line, _, _ := strings.Cut(answer, "\n")
			if err := json.Unmarshal([]byte(line), &got); err != nil {
				t.Fatalf("%v:\n%s", err, out)
			}
			says := strings.Join(got.Conditions, "; ")
			if (says != "") != (c.lacks != "") || !strings.Contains(says, c.lacks) || got.Sockets != c.sockets || got.Forwards != strings.Contains(c.capabilities, "perfmon") ||
				c.does.Forward && !got.Forwards && !strings.Contains(got.Why, "CAP_PERFMON") {
				t.Errorf("with capabilities %s: %+v; want a Condition with %q, sockets translated: %v", c.capabilities, got, c.lacks, c.sockets)
			}
		})
	}
}

// syncOnce is the child.
func syncOnce(t *testing.T, text string) {
	t.Helper()
	var p privileged
	netnstest.Check(t, json.Unmarshal([]byte(text), &p))
	config := ebpf.Config{Sockets: ebpf.Sockets{BPFFS: p.BPFFS, Cgroups: []string{p.Cgroup}, UDP: p.UDP}}
	config.Config = nftables.Config{Config: proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}}
	if p.Forward {
		config.FastPathByBPF, config.FastPathDevice = true, func(name string) bool { return name == "uplink" }
	}
	engine, err := ebpf.NewEngine(config, v1.IPv4Protocol, proxier.Deps{})
	netnstest.Check(t, err)
	provider, err := proxier.New(config.Config.Config, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
	netnstest.Check(t, err)
	provider.OnServiceSynced()
	provider.OnEndpointSlicesSynced()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- provider.Run(ctx) }()
	netnstest.Check(t, provider.Sync(t.Context()))
	for _, c := range engine.Abilities().Conditions() {
		p.Conditions = append(p.Conditions, c.Message)
	}
	_, err = engine.SocketCounts()
	p.Sockets = err == nil
	_, _, err = engine.ForwardCounts()
	if p.Forwards = err == nil; err != nil {
		p.Why = err.Error()
	}
	cancel()
	netnstest.Check(t, <-ended)
	answer, err := json.Marshal(p)
	netnstest.Check(t, errors.Join(err, provider.Cleanup(t.Context())))
	fmt.Printf("ANSWER %s\n", answer)
}
