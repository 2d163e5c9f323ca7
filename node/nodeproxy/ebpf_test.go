package nodeproxy

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// The default cgroups are those of pods, which may come later, and the one of daemons if it exists, never the root.
func TestCgroupsByDefault(t *testing.T) {
	for _, c := range []struct {
		flag, there, want []string
	}{
		{nil, nil, []string{"kubepods*"}},
		{nil, []string{"system.slice", "user.slice"}, []string{"kubepods*", "system.slice"}},
		{[]string{"user.slice"}, []string{"kubepods"}, []string{"user.slice"}},
	} {
		root := t.TempDir()
		in := func(names []string) (paths []string) {
			for _, name := range names {
				paths = append(paths, filepath.Join(root, name))
			}
			return paths
		}
		for _, path := range in(c.there) {
			if err := os.Mkdir(path, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		s := socketFlags{cgroups: in(c.flag)}
		if got := s.chosenCgroups(root); !slices.Equal(got, in(c.want)) {
			t.Errorf("--ebpf-cgroups=%v, %v exist: %v, want %v", c.flag, c.there, got, c.want)
		}
	}
}

func TestEBPFFlags(t *testing.T) {
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	var s socketFlags
	s.register(set)
	if err := set.Parse([]string{
		"--ebpf-mode=fast", "--ebpf-udp=translate", "--ebpf-bpffs=/bpf", "--ebpf-cgroups=/a,/b", "--ebpf-real-peer", "--ebpf-forward-devices=eth*,veth*", "--ebpf-forward-peers=veth*",
	}); err != nil {
		t.Fatal(err)
	}
	var errs faults
	s.validate(&errs)
	config := s.config(nftables.Config{FastPathAfter: 20})
	if c := config; !c.FastPathByBPF || !c.FastPathDevice("eth0") || c.FastPathDevice("lo") || c.FastPathPeer("eth0") || !c.FastPathPeer("veth1") || c.FastPathAfter != 0 {
		t.Errorf("the fast path is on: %t, after %d packets", c.FastPathByBPF, c.FastPathAfter)
	}
	got := config.Sockets
	if len(errs) > 0 || !got.PodsKeepSource || !got.UDP || !got.RealPeer || got.BPFFS != "/bpf" || !slices.Equal(got.Cgroups, []string{"/a", "/b"}) {
		t.Errorf("config %+v, errors %v", got, errs)
	}
}

// An annotation leaves Services to the rules, beside the annotation for health checks.
func TestServicesAreLeftToTheRules(t *testing.T) {
	for text, want := range map[string]bool{"": false, "true": false, "false": true, "maybe": false} {
		log, logs := observer.New(zapcore.WarnLevel)
		s := proxiertest.Service("test", "web", func(s *v1.Service) {
			s.Annotations = map[string]string{healthAnnotation: "tcp"}
			if text != "" {
				s.Annotations[ebpfAnnotation] = text
			}
		})
		var h healthFlags
		var port changetracker.ServicePort
		decorateSockets(newAnnotations(zap.New(log)), &port, s)
		h.decorate(&port, s)
		chosen, _ := changetracker.Ext[payload](port.Ext)
		if left := !bySockets(&desired.Service{Port: &port}); left != want || chosen.health.text != "tcp" || (logs.Len() == 1) != (text == "maybe") {
			t.Errorf("annotation %q: left to rules %v, health check %q, %d lines; want %v", text, left, chosen.health.text, logs.Len(), want)
		}
	}
	if !bySockets(&desired.Service{}) {
		t.Error("a Service without an object is left to the rules")
	}
}
