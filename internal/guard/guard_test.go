package guard

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/serviceplane/serviceplane"

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
	CgoFiles   []string
}

func list(t *testing.T, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Imports,Deps,CgoFiles"}, args...)...)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatalf("decode: %v", err)
		}
		pkgs = append(pkgs, p)
	}
}

// TestThePortablePackagesStayLight: an embedder that wants only trackers or the
// driver inherits no client, no metrics library and no netlink.
func TestThePortablePackagesStayLight(t *testing.T) {
	heavy := []string{
		"k8s.io/client-go", "github.com/prometheus/", "go.opentelemetry.io/", "github.com/vishvananda/netlink",
		"github.com/mdlayher/netlink", "github.com/google/nftables", "github.com/moby/ipvs", "github.com/spf13/",
	}
	for _, p := range list(t, module+"/changetracker", module+"/desired", module+"/runner", module+"/proxier") {
		for _, dep := range p.Deps {
			for _, h := range heavy {
				if strings.HasPrefix(dep+"/", strings.TrimSuffix(h, "/")+"/") {
					t.Errorf("%s depends on %s", p.ImportPath, dep)
				}
			}
		}
	}
}

// TestTheRunnerNeedsOnlyTheStandardLibrary keeps it fit for any program.
func TestTheRunnerNeedsOnlyTheStandardLibrary(t *testing.T) {
	for _, dep := range list(t, module+"/runner")[0].Deps {
		if first, _, _ := strings.Cut(dep, "/"); strings.Contains(first, ".") {
			t.Errorf("runner depends on %s", dep)
		}
	}
}

// TestWhatNobodyMayImport: modules that are not made to be imported, loggers that
// fight over global flags, and C.
func TestWhatNobodyMayImport(t *testing.T) {
	for _, p := range list(t, module+"/...") {
		if len(p.CgoFiles) > 0 {
			t.Errorf("%s uses cgo", p.ImportPath)
		}
		for _, dep := range p.Deps {
			for _, bad := range []string{"k8s.io/kubernetes/", "k8s.io/component-base/", "k8s.io/apiserver/"} {
				if strings.HasPrefix(dep+"/", bad) {
					t.Errorf("%s depends on %s", p.ImportPath, dep)
				}
			}
		}
		for _, imported := range p.Imports {
			if strings.HasPrefix(imported, "k8s.io/klog") {
				t.Errorf("%s imports %s", p.ImportPath, imported)
			}
		}
	}
}

// TestEnginesDoNotKnowEachOther, and the driver knows none of them.
func TestEnginesDoNotKnowEachOther(t *testing.T) {
	engines := []string{"nftables", "iptables", "ipvs", "userspace"}
	for _, p := range list(t, module+"/...") {
		own := strings.TrimPrefix(p.ImportPath, module+"/")
		for _, engine := range engines {
			isEngine := own != engine && (own == "proxier" || strings.Contains(" "+strings.Join(engines, " ")+" ", " "+own+" "))
			for _, dep := range p.Deps {
				if isEngine && dep == module+"/"+engine {
					t.Errorf("%s depends on %s", own, dep)
				}
			}
		}
	}
}
