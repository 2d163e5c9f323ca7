package ebpf_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// TestBpftoolPrintsFields: the maps carry BTF, so that their fields have names.
func TestBpftoolPrintsFields(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("bpftool"); err != nil {
		if os.Getenv("SERVICEPLANE_REQUIRE_BPFTOOL") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	n := newNode(t)
	n.start(t, n.world.RemotePods[0])
	netnstest.Check(t, proxiertest.Sync(t.Context(), n))
	n.mustTranslate(t)
	for name, want := range map[string][]string{
		"maps/frontends": {`"addr"`, `"port"`, `"protocol": 6`, `"service": 0`, `"scope": 0`},
		"maps/services":  {`"ranges"`},
		"maps/endpoints": {`"addr"`, `"port"`},
		"counts":         {`"values"`, `"cpu": 0`},
	} {
		out, err := exec.CommandContext(t.Context(), "bpftool", "map", "dump", "pinned", n.path(t, name)).CombinedOutput()
		netnstest.Check(t, err)
		for _, field := range want {
			if !strings.Contains(string(out), field) {
				t.Errorf("map %s: no %s in\n%.400s", name, field, out)
			}
		}
	}
}
