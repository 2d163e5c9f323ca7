package nodeproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/serviceplane/serviceplane/internal/bpftest"
	"github.com/serviceplane/serviceplane/internal/netns"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// bpfWorld is what mode ebpf needs: a BPF file system and a cgroup, both of the test alone.
type bpfWorld struct {
	t             *testing.T
	bpffs, cgroup string
}

// newBPFWorld makes both. Nobody is in the cgroup.
func newBPFWorld(t *testing.T) *bpfWorld {
	t.Helper()
	return &bpfWorld{t: t, bpffs: bpftest.FileSystem(t), cgroup: bpftest.NewCgroup(t)}
}

// flags are those of mode ebpf, also for the clean-up in other modes.
func (b *bpfWorld) flags() []string {
	return []string{"--ebpf-bpffs=" + b.bpffs, "--ebpf-cgroups=" + b.cgroup}
}

// links are the pinned links to the cgroup.
func (b *bpfWorld) links() []string {
	b.t.Helper()
	links, err := filepath.Glob(b.bpffs + "/serviceplane/*/ip[46]/v*/links-*/[cg]*")
	netnstest.Check(b.t, err)
	return links
}

// isClean reports whether nothing is pinned. The kernel has files of its own there.
func (b *bpfWorld) isClean() bool {
	_, err := os.Stat(filepath.Join(b.bpffs, "serviceplane"))
	return errors.Is(err, os.ErrNotExist)
}

// ask connects from a process in the cgroup, and returns the name of the server that answers.
func (b *bpfWorld) ask(from *netns.NS, to netip.AddrPort) string {
	b.t.Helper()
	cgroup, err := os.Open(b.cgroup)
	netnstest.Check(b.t, err)
	defer func() { _ = cgroup.Close() }()
	script := fmt.Sprintf("exec 3<>/dev/tcp/%s/%d; printf '\\n' >&3; read -r answer <&3; printf %%s \"$answer\"", to.Addr(), to.Port())
	client := exec.CommandContext(b.t.Context(), "timeout", "10", "bash", "-c", script)
	client.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	var out []byte
	netnstest.Check(b.t, from.Do(func() (err error) {
		out, err = client.Output()
		return err
	}))
	name, _, _ := strings.Cut(string(out), " ")
	return name
}

// sample reads a metric; -1 if it does not exist.
func (p *proxyProcess) sample(name string) float64 {
	p.t.Helper()
	_, text := p.get("127.0.0.1:10249", "/metrics")
	match := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (.+)$`).FindStringSubmatch(text)
	if match == nil {
		return -1
	}
	n, err := strconv.ParseFloat(match[1], 64)
	netnstest.Check(p.t, err)
	return n
}

// bpfLinks is how many links attach both IP families to a cgroup.
const bpfLinks = 6

const (
	translated4 = `serviceplane_sockets_translated_total{ip_family="IPv4"}`
	translated6 = `serviceplane_sockets_translated_total{ip_family="IPv6"}`
)

// skippedService is left to the rules by its annotation.
const skippedService = `apiVersion: v1
kind: Service
metadata: {name: skipped, annotations: {serviceplane.io/ebpf: "false"}}
spec:
  clusterIP: 10.96.0.20
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: skipped-1, labels: {kubernetes.io/service-name: skipped}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: ["10.244.2.2"]}]
`

// TestModeEBPF: processes in the cgroup are translated when they connect, others are not, and neither are
// those that connect to a Service that its annotation leaves to the rules.
func TestModeEBPF(t *testing.T) {
	t.Parallel()
	c, d, b := newSmall(t), newDirectory(t), newBPFWorld(t)
	d.write("skipped.yaml", skippedService)
	p := start(t, c.node, append(b.flags(), "--proxy-mode=ebpf", "--manifests="+d.path, "--state-dir="+t.TempDir(), "--cluster-cidr=10.244.0.0/16,fd00:244::/32")...)
	p.waitHealthy()
	c.expectSoon("pod-1")
	if n := p.sample(translated4); n != 0 {
		t.Errorf("%v sockets translated, want none: all clients were outside of the cgroup", n)
	}
	for _, step := range []struct {
		to, want, metric string
		translated       float64
	}{
		{vip4, "pod-1", translated4, 1},
		{vip6, "pod-1", translated6, 1},
		{"10.96.0.20:80", "pod-2", translated4, 1}, // as before
		{vip4, "pod-1", translated4, 2},
	} {
		if got := b.ask(c.pods[1], netip.MustParseAddrPort(step.to)); got != step.want {
			t.Errorf("%s: %q answers, want %s", step.to, got, step.want)
		}
		if n := p.sample(step.metric); n != step.translated {
			t.Errorf("%s: %v sockets translated, want %v", step.to, n, step.translated)
		}
	}
	if n := p.sample(`serviceplane_sockets_left_to_rules_total{ip_family="IPv4",reason="bound"}`); n != 0 {
		t.Errorf("%v bound sockets, want 0", n)
	}
	if err := p.signal(syscall.SIGTERM); err != nil {
		t.Errorf("the proxy ends with %v, want exit code 0", err)
	}
	if got := b.ask(c.pods[1], netip.MustParseAddrPort(vip4)); got != "pod-1" || len(b.links()) == 0 {
		t.Errorf("without the process %q answers, links %v, want pod-1 by the links", got, b.links())
	}
	cleanUp(t, c.node, append(b.flags(), "--state-dir="+t.TempDir())...) // in mode nftables
	if rules := c.rules(); !b.isClean() || rules != "" {
		t.Errorf("after --cleanup, links are %v, rules\n%s", b.links(), rules)
	}
}

// Sockets of listed namespaces are translated, or left to the rules, as soon as a namespace is in the folder, and
// until it leaves the folder.
func TestSocketsOfListedNamespaces(t *testing.T) {
	t.Parallel()
	for flag, whenListed := range map[string]bool{"--ebpf-only-namespaces": true, "--ebpf-skip-namespaces": false} {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			c, d, b, folder := newSmall(t), newDirectory(t), newBPFWorld(t), t.TempDir()
			flags := append(b.flags(), "--proxy-mode=ebpf", "--manifests="+d.path, "--state-dir="+t.TempDir(), "--cluster-cidr=10.244.0.0/16,fd00:244::/32", flag+"="+folder)
			p := start(t, c.node, flags...)
			p.waitHealthy()
			c.expectSoon("pod-1")
			translates := func() bool {
				before := p.sample(translated4)
				if got := b.ask(c.pods[1], netip.MustParseAddrPort(vip4)); got != "pod-1" {
					t.Errorf("%q answers, want pod-1", got)
				}
				return p.sample(translated4) == before+1
			}
			if before := p.sample(translated4); b.ask(c.node, netip.MustParseAddrPort(vip4)) != "pod-1" || p.sample(translated4) != before+1 {
				t.Error("the node's own sockets are not translated")
			}
			at := filepath.Join(folder, "cni-1")
			for _, listed := range []bool{false, true, false} {
				switch {
				case listed:
					netnstest.Check(t, os.WriteFile(at, nil, 0o600)) // as container runtimes begin
					poll.Until(t, "a warning", func() bool { return strings.Contains(p.stderr(), "a network namespace cannot be listed") })
					netnstest.Check(t, errors.Join(os.Remove(at), os.Symlink(c.pods[1].Path(), at)))
				case !listed:
					if err := os.Remove(at); err != nil && !errors.Is(err, os.ErrNotExist) {
						t.Fatal(err)
					}
				}
				poll.Until(t, fmt.Sprintf("sockets are translated: %v", listed == whenListed), func() bool { return translates() == (listed == whenListed) })
			}
		})
	}
}

// TestAFolderOfNamespacesThatCannotBeReadForgetsNone: otherwise sockets of a skipped pod would be
// translated, for as long as it lasts.
func TestAFolderOfNamespacesThatCannotBeReadForgetsNone(t *testing.T) {
	t.Parallel()
	folder := filepath.Join(t.TempDir(), "netns")
	at := filepath.Join(folder, "cni-1")
	netnstest.Check(t, errors.Join(os.Mkdir(folder, 0o700), os.Symlink(netnstest.New(t).Path(), at)))
	core, logs := observer.New(zap.WarnLevel)
	s := socketFlags{skipIn: folder}
	s.openNamespaces(zap.New(core))
	netnstest.Check(t, errors.Join(os.Rename(folder, folder+".away"), os.WriteFile(folder, nil, 0o600)))
	for range 3 {
		s.namespaces.look()
	}
	if len(s.namespaces.listed) != 1 || logs.Len() != 1 {
		t.Errorf("%d namespaces are listed, %d log lines, want 1 of each", len(s.namespaces.listed), logs.Len())
	}
	netnstest.Check(t, errors.Join(os.Remove(folder), os.Rename(folder+".away", folder), os.Remove(at)))
	if s.namespaces.look(); len(s.namespaces.listed) != 0 {
		t.Errorf("%v is listed, want none", s.namespaces.listed)
	}
}

// TestForwardOfModeEBPF: packets of open connections pass no rules, between the devices of the flags.
func TestForwardOfModeEBPF(t *testing.T) {
	t.Parallel()
	c, d, b := newSmall(t), newDirectory(t), newBPFWorld(t)
	p := start(t, c.node, append(b.flags(), "--proxy-mode=ebpf", "--manifests="+d.path, "--state-dir="+t.TempDir(), "--cluster-cidr=10.244.0.0/16,fd00:244::/32",
		"--nftables-fast-path=all", "--ebpf-forward-devices=*", "--conntrack-tcp-be-liberal")...)
	p.waitHealthy()
	c.expectSoon("pod-1")
	const forwarded = `serviceplane_forward_packets_total{ip_family="IPv4",to="device"}`
	before := p.sample(forwarded)
	if got := c.ask(netip.MustParseAddrPort(vip4), netns.AskOptions{}); got != "pod-1" {
		t.Errorf("%q answers, want pod-1", got)
	}
	if n := p.sample(forwarded); before < 0 || n <= before {
		t.Errorf("%v packets forwarded past the rules, %v before", n, before)
	}
}

// TestEBPFWithoutItsFileSystem: rules do everything, and nodeproxy says so.
func TestEBPFWithoutItsFileSystem(t *testing.T) {
	t.Parallel()
	c, d, b := newSmall(t), newDirectory(t), newBPFWorld(t)
	p := start(t, c.node, append(b.flags(), "--proxy-mode=ebpf", "--ebpf-bpffs="+t.TempDir(), "--manifests="+d.path, "--state-dir="+t.TempDir())...)
	p.waitHealthy()
	c.expectSoon("pod-1")
	for _, text := range []string{"sockets are not translated, rules do everything", "is not a BPF file system"} {
		if !strings.Contains(p.stderr(), text) {
			t.Errorf("the log does not say %q", text)
		}
	}
	for _, family := range []string{"IPv4", "IPv6"} {
		if n := p.sample(`serviceplane_condition{ip_family="` + family + `",type="Sockets"}`); n != 1 {
			t.Errorf("%s: Condition Sockets is %v, want 1", family, n)
		}
	}
	if n := p.sample(translated4); n != -1 {
		t.Errorf("%v sockets translated, want no such metric", n)
	}
}

// within moves this process into the cgroup, and what it starts, until the test ends.
func (b *bpfWorld) within() {
	b.t.Helper()
	text, err := os.ReadFile("/proc/self/cgroup")
	netnstest.Check(b.t, err)
	before := ""
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(strings.TrimSpace(line), "0::"); is {
			before = filepath.Join(filepath.Dir(b.cgroup), path)
		}
	}
	move := func(to string) error {
		return os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0o600)
	}
	netnstest.Check(b.t, move(b.cgroup))
	b.t.Cleanup(func() { netnstest.Check(b.t, move(before)) })
}

// TestTheContainerInModeEBPF: the rights that the manifest's option adds are enough, also to verify.
func TestTheContainerInModeEBPF(t *testing.T) {
	t.Parallel()
	c, dir, b, d := newSmall(t), newDirectory(t), newBPFWorld(t), readDeployment(t, "EBPF", "PAGE")
	if add := d.container().SecurityContext.Capabilities.Add; len(add) != 2 || add[1] != "BPF" {
		t.Errorf("capabilities are %v, want two", add)
	}
	folders := map[string]string{}
	for _, volume := range d.daemonSet.Spec.Template.Spec.Volumes {
		if volume.HostPath != nil {
			folders[volume.Name] = volume.HostPath.Path
		}
	}
	for _, mount := range d.container().VolumeMounts {
		if folder, is := folders[mount.Name]; is && folder != mount.MountPath {
			t.Errorf("%s is at %s, want %s, where nodeproxy looks", mount.Name, mount.MountPath, folder)
		}
	}
	if len(folders) != 2 {
		t.Errorf("folders of the node are %v, want those of BPF and cgroups", folders)
	}
	d.container().Args = append(d.container().Args, append(b.flags(), "--manifests="+dir.path, "--detect-local-mode=ClusterCIDR", "--cluster-cidr=10.244.0.0/16,fd00:244::/32")...)
	p := d.startContainer(c, nil)
	p.waitHealthy()
	if got := b.ask(c.pods[1], netip.MustParseAddrPort(vip4)); got != "pod-1" || p.sample(translated4) != 1 {
		t.Errorf("%q answers, %v sockets translated, want pod-1 and 1", got, p.sample(translated4))
	}
	if code, text := p.get("192.0.2.10:10290", "/verify"); code != 200 || !strings.Contains(text, `"agrees":true`) {
		t.Errorf("verify: status %d, %s", code, text)
	}
	if code, text := p.get("192.0.2.10:10290", "/rules?namespace=default&name=web"); code != 200 || !strings.Contains(text, "10.96.0.10:80/TCP: by sockets, 1 endpoints") || !strings.Contains(text, "by rules, because it is a node port") {
		t.Errorf("rules: status %d, %s", code, text)
	}
}
