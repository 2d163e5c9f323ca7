package guard

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/serviceplane/serviceplane"

type pkg struct {
	ImportPath                         string
	Imports, TestImports, XTestImports []string
	Deps                               []string
	CgoFiles                           []string
}

// list asks the go command about packages as one system sees them. Cgo is on,
// because otherwise go list hides the files that use it.
func list(t *testing.T, goos string, patterns ...string) []pkg {
	t.Helper()
	args := []string{"list", "-json=ImportPath,Imports,TestImports,XTestImports,Deps,CgoFiles"}
	cmd := exec.CommandContext(t.Context(), "go", append(args, patterns...)...)
	cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH=amd64", "CGO_ENABLED=1")
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, complaint.String())
	}
	var pkgs []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatalf("decode: %v", err)
		}
		pkgs = append(pkgs, p)
	}
}

// onEachSystem calls test with what go list says on each system that we build for.
func onEachSystem(t *testing.T, test func(t *testing.T, pkgs []pkg), patterns ...string) {
	t.Helper()
	for _, goos := range []string{"linux", "darwin", "windows"} {
		t.Run(goos, func(t *testing.T) {
			pkgs := list(t, goos, patterns...)
			if len(pkgs) < len(patterns) {
				t.Fatalf("go list knows %d packages, want at least %d", len(pkgs), len(patterns))
			}
			test(t, pkgs)
		})
	}
}

// within reports whether a package is one of a module, or of a part of it.
func within(path, parent string) bool {
	return path == parent || strings.HasPrefix(path, parent+"/")
}

// TestThePortablePackagesStayLight: an embedder that wants only trackers or the
// driver inherits no client, no metrics library and no netlink.
func TestThePortablePackagesStayLight(t *testing.T) {
	heavy := []string{
		"k8s.io/client-go", "github.com/prometheus", "go.opentelemetry.io", "github.com/vishvananda/netlink",
		"github.com/mdlayher/netlink", "github.com/google/nftables", "github.com/moby/ipvs", "github.com/spf13",
	}
	onEachSystem(t, func(t *testing.T, pkgs []pkg) {
		for _, p := range pkgs {
			for _, dep := range p.Deps {
				if slices.ContainsFunc(heavy, func(h string) bool { return within(dep, h) }) {
					t.Errorf("%s depends on %s", p.ImportPath, dep)
				}
			}
		}
	}, module+"/changetracker", module+"/desired", module+"/runner", module+"/proxier", module+"/healthcheck", module+"/debughttp", module+"/hybrid", module+"/userspace", module+"/userspace/connection", module+"/zaplog")
}

// TestWhoMayImportWhat: client-go is for who has an API server, and what programs
// are made of is for programs.
func TestWhoMayImportWhat(t *testing.T) {
	examples := module + "/examples"
	allowed := map[string][]string{
		"k8s.io/client-go":               {module + "/informer", module + "/internal/apitest", examples},
		"github.com/containernetworking": {examples},
		"github.com/spf13":               {examples},
		"github.com/fsnotify":            {examples},
		"github.com/prometheus":          {module + "/metrics", examples},
		"go.opentelemetry.io":            {module + "/tracing", examples},
		"go.yaml.in/yaml/v3":             {module + "/informer", module + "/internal/apitest", module + "/internal/manifest", examples},
		"github.com/moby/ipvs":           {module + "/ipvs", examples},
		"github.com/vishvananda/netlink": {module + "/internal/netns", module + "/nodedeps", module + "/proxiertest", module + "/nftables", module + "/internal/nftables", module + "/iptables", module + "/conntrack", module + "/internal/netlinkx", module + "/ipvs", examples},
	}
	onEachSystem(t, func(t *testing.T, pkgs []pkg) {
		for _, p := range pkgs {
			for _, dep := range slices.Concat(p.Deps, p.Imports) {
				for heavy, users := range allowed {
					isUser := slices.ContainsFunc(users, func(u string) bool { return within(p.ImportPath, u) })
					if within(dep, heavy) && !isUser {
						t.Errorf("%s depends on %s", p.ImportPath, dep)
					}
				}
			}
		}
	}, module+"/...")
}

// TestTheRunnerNeedsOnlyTheStandardLibrary keeps it fit for any program.
func TestTheRunnerNeedsOnlyTheStandardLibrary(t *testing.T) {
	onEachSystem(t, func(t *testing.T, pkgs []pkg) {
		for _, dep := range pkgs[0].Deps {
			if first, _, _ := strings.Cut(dep, "/"); strings.Contains(first, ".") {
				t.Errorf("runner depends on %s", dep)
			}
		}
	}, module+"/runner")
}

// TestWhatNobodyMayImport: modules that are not made to be imported, loggers that
// fight over global flags, and C. But a program may tell klog where to write.
func TestWhatNobodyMayImport(t *testing.T) {
	internal := []string{"k8s.io/kubernetes", "k8s.io/component-base", "k8s.io/apiserver"}
	onEachSystem(t, func(t *testing.T, pkgs []pkg) {
		for _, p := range pkgs {
			if len(p.CgoFiles) > 0 {
				t.Errorf("%s uses cgo: %v", p.ImportPath, p.CgoFiles)
			}
			imported := slices.Concat(p.Imports, p.TestImports, p.XTestImports)
			for _, dep := range slices.Concat(p.Deps, imported) {
				if slices.ContainsFunc(internal, func(i string) bool { return within(dep, i) }) {
					t.Errorf("%s depends on %s", p.ImportPath, dep)
				}
			}
			for _, dep := range imported {
				if within(dep, "k8s.io/klog") && p.ImportPath != module+"/examples/nodeproxy" {
					t.Errorf("%s imports %s", p.ImportPath, dep)
				}
			}
		}
	}, module+"/...")
}

// TestAnEngineCanBeWrittenOutside: the example, with its test, does it with what is
// public.
func TestAnEngineCanBeWrittenOutside(t *testing.T) {
	p := list(t, "linux", module+"/examples/own-engine")[0]
	for _, dep := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
		if within(dep, module+"/internal") {
			t.Errorf("%s imports %s", p.ImportPath, dep)
		}
	}
}

// TestEnginesDoNotKnowEachOther, and neither the driver nor observers know any of them.
func TestEnginesDoNotKnowEachOther(t *testing.T) {
	engines := []string{module + "/nftables", module + "/iptables", module + "/ipvs", module + "/userspace"}
	onEachSystem(t, func(t *testing.T, pkgs []pkg) {
		for _, p := range pkgs {
			for _, dep := range p.Deps {
				if dep != p.ImportPath && slices.Contains(engines, dep) {
					t.Errorf("%s depends on %s", p.ImportPath, dep)
				}
			}
		}
	}, append(engines, module+"/proxier", module+"/metrics", module+"/tracing", module+"/debughttp")...)
}
