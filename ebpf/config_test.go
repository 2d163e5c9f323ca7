package ebpf_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/ebpf"
	"github.com/serviceplane/serviceplane/proxier"
)

// Validate names every wrong field.
func TestValidate(t *testing.T) {
	t.Parallel()
	good := ebpf.Config{Sockets: ebpf.Sockets{Cgroups: []string{"/sys/fs/cgroup/kubepods.slice"}}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	bad := ebpf.Config{Sockets: ebpf.Sockets{Cgroups: []string{"kubepods", "/a", "/a"}, BPFFS: "bpf"}}
	bad.AffinityRecords, bad.Runner.MinInterval = 0, -2
	err := bad.Validate()
	for _, want := range []string{`Sockets.Cgroups: "kubepods"`, `Sockets.Cgroups: "/a"`, `Sockets.BPFFS: "bpf"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q in it", err, want)
		}
	}
	if err := (ebpf.Config{}).Validate(); !errors.Is(err, proxier.ErrInvalidConfig) || !strings.Contains(err.Error(), "Sockets.Cgroups: empty") {
		t.Errorf("%v, want an error about Cgroups", err)
	}
}
