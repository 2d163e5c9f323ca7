package guard

import (
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/serviceplane/serviceplane/internal/guard/documents"
	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

const module = gocmd.Module

// packages lists the packages of all modules on one system. CGO_ENABLED=1 makes go list
// show files that use cgo.
func packages(t *testing.T, goos string) []gocmd.Package {
	t.Helper()
	all, err := gocmd.List(t.Context(), root, []string{"GOOS=" + goos, "GOARCH=amd64", "CGO_ENABLED=1"})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// importers are the only packages, by folder, that may depend on a module. So changetracker,
// desired, runner, proxier, canary, endpointhealth, healthcheck, debughttp, hybrid,
// leastconnections, userspace and zaplog stay light.
var importers = map[string][]string{
	"k8s.io/kubernetes":              {},
	"k8s.io/component-base":          {},
	"k8s.io/apiserver":               {},
	"k8s.io/client-go":               {"informer", "internal/apiclient", "internal/apitest", "internal/fleet", "node/programmed/cluster", "examples", "node/nodeproxy"},
	"k8s.io/client-go/kubernetes":    {"examples/cni-plugin", "examples/hybrid"}, // every API group: 13 MB
	"k8s.io/client-go/informers":     {"examples/cni-plugin"},
	"github.com/containernetworking": {"examples"},
	"github.com/spf13":               {"examples", "node/nodeproxy"},
	"github.com/fsnotify":            {"examples", "node/nodeproxy"},
	"github.com/prometheus":          {"node/metrics", "examples", "node/nodeproxy"},
	"go.opentelemetry.io":            {"node/tracing", "examples", "node/nodeproxy"},
	"go.yaml.in/yaml/v3":             {"informer", "internal/apitest", "internal/fleet", "internal/manifest", "examples", "node/nodeproxy"},
	"github.com/moby/ipvs":           {"ipvs", "examples", "node/nodeproxy"},
	"github.com/vishvananda/netlink": netlinkUsers,
	"github.com/mdlayher/netlink":    netlinkUsers,
	"github.com/google/nftables":     netlinkUsers,
	"github.com/cilium/ebpf":         {"ebpf", "examples", "node/nodeproxy", "internal/bpftest", "internal/bpfx"},
	// An engine knows no other, and neither the driver nor observers know one. Package ebpf has the
	// rules of nftables below.
	module + "/nftables":  {"nftables", "ebpf", "internal/guard/weight", "examples", "node/nodeproxy"},
	module + "/ebpf":      {"ebpf", "examples", "node/nodeproxy"},
	module + "/iptables":  {"iptables", "examples", "node/nodeproxy"},
	module + "/ipvs":      {"ipvs", "examples", "node/nodeproxy"},
	module + "/userspace": {"userspace", "internal/userspacetest", "examples", "node/nodeproxy"},
}

var netlinkUsers = []string{"conntrack", "ebpf", "examples", "node/nodeproxy", "internal/bpftest", "internal/chaos", "internal/endings", "internal/fleet", "internal/guard/weight", "internal/netlinkx", "internal/netns", "internal/nft", "internal/nftables", "internal/nftext", "internal/nftrace", "internal/userspacetest", "iptables", "ipvs", "nftables", "node/nodedeps", "node/packettrace", "proxiertest"}

func within(path, parent string) bool { return path == parent || strings.HasPrefix(path, parent+"/") }

func TestImports(t *testing.T) {
	t.Parallel()
	for _, goos := range []string{"linux", "darwin", "windows"} {
		for _, p := range packages(t, goos) {
			for _, fault := range faults(&p) {
				t.Errorf("%s: %s %s", goos, p.ImportPath, fault)
			}
		}
	}
}

// needAPIServer matches the tests of examples that need the API server of internal/apitest.
var needAPIServer = regexp.MustCompile(`^examples/(cni-plugin|gateway|prestop|readinessgate)/.*_test\.go$`) // read-only

// Another module can copy the examples: they import no internal package.
func TestExamplesCanBeCopied(t *testing.T) {
	t.Parallel()
	for name, text := range documents.Read(t, root, ".go") {
		if strings.HasPrefix(name, "examples/") && strings.Contains(text, `"`+module+"/internal/") && !needAPIServer.MatchString(name) {
			t.Errorf("%s imports an internal package: use a public package, or move the few lines here", name)
		}
	}
}

// unshown matches the folders of packages that need no Example.
var unshown = regexp.MustCompile(`^\.$|^(docs|hack|examples|internal|node/nodeproxy/cmd)(/|$)|/internal/`) // read-only

// Every package has an example that runs: go doc shows it.
func TestEveryPackageHasAnExample(t *testing.T) {
	t.Parallel()
	has := map[string]bool{}
	for name, text := range documents.Read(t, root, "_test.go") {
		if strings.Contains(text, "\nfunc Example") && strings.Contains(text, "// Output:") {
			has[path.Dir(name)] = true
		}
	}
	for _, p := range packages(t, "linux") {
		if folder := path.Clean(strings.TrimPrefix(p.ImportPath+"/", module+"/")); !has[folder] && !unshown.MatchString(folder) {
			t.Errorf("package %s has no Example that runs", folder)
		}
	}
}

func faults(p *gocmd.Package) (faults []string) {
	for _, dep := range p.Deps {
		for heavy, users := range importers {
			used := dep == heavy || within(dep, heavy) && !within(dep, module) // a package below a heavy one is not it
			if used && !slices.ContainsFunc(users, func(u string) bool { return within(p.ImportPath, module+"/"+u) }) {
				faults = append(faults, "depends on "+dep)
			}
		}
		if first, _, _ := strings.Cut(dep, "/"); p.ImportPath == module+"/runner" && strings.Contains(first, ".") {
			faults = append(faults, "needs more than the standard library: "+dep)
		}
	}
	for _, dep := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
		if within(dep, "k8s.io/klog") && p.ImportPath != module+"/node/nodeproxy" && p.ImportPath != module+"/node/nodeproxy/cmd/nodeproxy" {
			faults = append(faults, "imports "+dep)
		}
	}
	if len(p.CgoFiles) > 0 {
		faults = append(faults, "uses cgo: "+strings.Join(p.CgoFiles, ", "))
	}
	return faults
}
