package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/nftables"
	"go.uber.org/goleak"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runShow runs the program as root, and wants no tables and namespaces afterwards.
func runShow(ctx context.Context, t *testing.T, out io.Writer, dir string, m mode) {
	t.Helper()
	probe, err := newHost()
	if errors.Is(err, fs.ErrPermission) && os.Getenv("SERVICEPLANE_REQUIRE_KERNEL") != "1" {
		t.Skipf("needs network namespaces: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := probe.close(); err != nil {
		t.Fatal(err)
	}
	tables, namespaces := rootTables(t), openNamespaces(t)
	t.Setenv("TMPDIR", t.TempDir()) // others run the program, too
	leftovers := filepath.Join(os.TempDir(), "quickstart-*")
	folders, err := filepath.Glob(leftovers)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(ctx, out, dir, options{mode: m}); err != nil {
		t.Fatalf("run: %v", err)
	}
	if got := rootTables(t); got != tables {
		t.Errorf("%d tables in the namespace of the process, want %d as before", got, tables)
	}
	if got := openNamespaces(t); got != namespaces {
		t.Errorf("%d open namespaces, want %d as before", got, namespaces)
	}
	if got, err := filepath.Glob(leftovers); err != nil || !slices.Equal(got, folders) {
		t.Errorf("folders are %v, error %v, want %v as before", got, err, folders)
	}
	if mounts, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(mounts), "/quickstart-") {
		t.Errorf("mounts are\n%s\nerror %v, want none of the program", mounts, err)
	}
}

func TestTheTableOfEachService(t *testing.T) {
	for _, m := range kernelModes() {
		t.Run(string(m), func(t *testing.T) { checkTables(t, m) })
	}
}

func checkTables(t *testing.T, m mode) {
	var out bytes.Buffer
	runShow(t.Context(), t, &out, "", m)
	text := out.String()
	for rule, pattern := range map[string]string{
		"a pod keeps its source at a ClusterIP":        `10\.96\.0\.10:80/TCP +ClusterIP +Cluster +pod +(web-\d x\d+,? ?)+ +client's own\n`,
		"a client is masqueraded at a ClusterIP":       `10\.96\.0\.10:80/TCP +ClusterIP +Cluster +client +(web-\d x\d+,? ?)+ +node\n`,
		"both families are served":                     `\[fd00:10:96::10\]:80/TCP +ClusterIP +Cluster +client +(web-\d x\d+,? ?)+ +node\n`,
		"a node port masquerades":                      `192\.0\.2\.10:30080/TCP +NodePort +Cluster +client +(shop-\d x\d+,? ?)+ +node\n`,
		"policy Local uses local pods, source kept":    `192\.0\.2\.10:30443/TCP +NodePort +Local +client +edge-1 x12 +client's own\n`,
		"source ranges allow the client":               `203\.0\.113\.10:443/TCP +LoadBalancer +Local, ranges +client +edge-1 x12 +client's own\n`,
		"source ranges drop other clients":             `203\.0\.113\.10:443/TCP +LoadBalancer +Local, ranges +stranger +nobody: dropped\n`,
		"affinity sends a client to one endpoint":      `10\.96\.0\.40:80/TCP +ClusterIP +Cluster, sticky +client +cart-\d x12 +node\n`,
		"datagrams are served":                         `10\.96\.0\.2:53/UDP +ClusterIP +Cluster +pod +(dns-\d x\d+,? ?)+ +client's own\n`,
		"a headless Service is not programmed":         `default/db +none +nothing is programmed\n`,
		"a Service without endpoints rejects":          `10\.96\.0\.50:80/TCP +ClusterIP +Cluster +client +nobody: rejected\n`,
		"sync times":                                   `synced: IPv4 [\d.µm]+s for \d+ kernel objects, IPv6 [\d.µm]+s for \d+ kernel objects\n`,
		"the scaled Service is shown with its new pod": `default/web scaled up by web-new\n`,
	} {
		if !regexp.MustCompile(pattern).MatchString(text) {
			t.Errorf("%s: nothing in the output matches %s", rule, pattern)
		}
	}
	// Of the table, those of the pod to two frontends of web, and to shop and edge; and of web twice more.
	if want := fmt.Sprintf("%d sockets were translated", (2+2+2+2)*connections); m == modeEBPF && !strings.Contains(text, want) {
		t.Errorf("the output does not contain %q", want)
	}
	_, last, found := strings.Cut(text, "default/web without web-1, which has stopped\n")
	if !found || strings.Contains(last, "web-1 ") || strings.Contains(last, "nobody") || !strings.Contains(last, "web-2 ") {
		t.Errorf("after web-1 has stopped, the table is\n%s\nwant it without web-1 and without failures", last)
	}
	if lines := strings.Count(text, "\n"); lines > 60 {
		t.Errorf("%d lines of output, want at most 60", lines)
	}
	if t.Failed() {
		t.Log(text)
	}
}

// interrupter ends the context once something has been printed.
type interrupter struct{ interrupt context.CancelFunc }

func (i interrupter) Write(p []byte) (int, error) {
	i.interrupt()
	return len(p), nil
}

func TestAnInterruptLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	runShow(ctx, t, interrupter{cancel}, "", modeNFTables)
	if ctx.Err() == nil {
		t.Error("the demonstration ended without an interrupt")
	}
}

func TestOtherManifests(t *testing.T) {
	dir := t.TempDir()
	manifest := `
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: till}
spec: {clusterIP: 10.200.0.1, ports: [{port: 99}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: till-1, labels: {kubernetes.io/service-name: till}}
addressType: IPv4
ports: [{name: "", protocol: TCP, port: 9999}]
endpoints: [{addresses: [10.7.0.1], nodeName: node-1}, {addresses: [10.7.0.2]}]
`
	if err := os.WriteFile(filepath.Join(dir, "till.yaml"), []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	runShow(t.Context(), t, &out, dir, modeNFTables)
	for _, want := range []string{"1 Services, 2 pods", "shop/till scaled up by till-new", "10.7.0.1 x", "shop/till without 10.7.0.1"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output does not contain %q:\n%s", want, &out)
		}
	}
}

func TestThePlanHasEveryFrontend(t *testing.T) {
	for _, m := range kernelModes() {
		t.Run(string(m), func(t *testing.T) { checkPlan(t, m) })
	}
}

func checkPlan(t *testing.T, m mode) {
	var out bytes.Buffer
	if err := run(t.Context(), &out, "", options{planOnly: true, mode: m}); err != nil {
		t.Fatalf("run: %v", err)
	}
	for _, want := range []string{"# IPv4", "# IPv6", "10.96.0.10", "fd00:10:96::10", "203.0.113.10", "30080", "10.96.0.50"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the plan does not contain %q", want)
		}
	}
	if strings.Contains(out.String(), "5432") {
		t.Error("the plan has the headless Service's port 5432")
	}
}

// TestThePlanNeedsNoNames: another process may program them at the same time.
func TestThePlanNeedsNoNames(t *testing.T) {
	for _, m := range kernelModes() {
		engine, err := m.engine(proxier.Config{}, v1.IPv4Protocol)
		if err != nil {
			t.Fatal(err)
		}
		if !engine.Abilities().OwnsNames {
			t.Errorf("%s: the engine owns no names", m)
		}
		if can := (&planning{Engine: engine}).Abilities(); can.OwnsNames || can.Watch != nil {
			t.Errorf("%s: the plan owns names, or watches", m)
		}
	}
}

func TestErrorsNameTheFolder(t *testing.T) {
	err := run(t.Context(), io.Discard, t.TempDir(), options{})
	if err == nil || !strings.Contains(err.Error(), "load manifests of "+os.TempDir()) {
		t.Errorf("run = %v, want an error with the folder", err)
	}
}

func TestWithoutPrivilegeThereIsAPlan(t *testing.T) {
	if os.Getuid() == 0 {
		const nobody = 65534
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$")
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("as nobody: %v\n%s", err, out)
		}
		return
	}
	var out bytes.Buffer
	if err := run(t.Context(), &out, "", options{mode: modeNFTables}); err != nil {
		t.Fatalf("run: %v", err)
	}
	if got := out.String(); !strings.HasPrefix(got, "No demonstration") || !strings.Contains(got, "10.96.0.10") {
		t.Errorf("output is %.80q, want the reason and then the plan", got)
	}
}

func rootTables(t *testing.T) int {
	t.Helper()
	tables, err := (&nftables.Conn{}).ListTables()
	if err != nil {
		t.Fatalf("list tables: %v", err)
	}
	return len(tables)
}

// openNamespaces counts the network namespaces that the process has open.
func openNamespaces(t *testing.T) int {
	t.Helper()
	files, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, file := range files {
		if target, err := os.Readlink(file); err == nil && strings.HasPrefix(target, "net:") {
			n++
		}
	}
	return n
}
