package nodeproxy

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
)

// kubeProxys are all flags of kube-proxy 1.37, hidden and deprecated ones too. Sources:
// kubernetes/kubernetes, cmd/kube-proxy/app/options.go and init_windows.go;
// k8s.io/component-base, logs/api/v1/options.go and version/verflag.
const kubeProxys = `bind-address bind-address-hard-fail cleanup cluster-cidr config config-sync-period
	conntrack-max-per-core conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait conntrack-tcp-timeout-established
	conntrack-udp-timeout conntrack-udp-timeout-stream detect-local-mode feature-gates healthz-bind-address healthz-port help
	hostname-override init-only iptables-localhost-nodeports iptables-masquerade-bit iptables-min-sync-period iptables-sync-period
	ipvs-exclude-cidrs ipvs-min-sync-period ipvs-scheduler ipvs-strict-arp ipvs-sync-period ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout
	kube-api-burst kube-api-content-type kube-api-qps kubeconfig log-flush-frequency log-json-info-buffer-size log-json-split-stream
	log-text-info-buffer-size log-text-split-stream logging-format masquerade-all master metrics-bind-address metrics-port nodeport-addresses
	oom-score-adj pod-bridge-interface pod-interface-name-prefix profiling proxy-mode proxy-port-range show-hidden-metrics-for-version
	v version vmodule windows-service write-config-to`

// read reads a command line as the program does. It returns the completed options.
func read(t *testing.T, args ...string) *options {
	t.Helper()
	var o options
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags.SetNormalizeFunc(wordSeparators)
	o.register(flags)
	var errs faults
	errs.tolerate(flags)
	if err := flags.Parse(errs.known(flags, args)); err != nil || len(errs) > 0 {
		t.Fatalf("parse %q: %v, %v", args, err, errs)
	}
	o.complete(flags)
	return &o
}

func TestEveryFlagOfKubeProxyIsKnown(t *testing.T) {
	var out bytes.Buffer
	if err := execute(t.Context(), []string{"--help"}, &out); err != nil {
		t.Fatal(err)
	}
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	(&options{}).register(flags)
	for name := range strings.FieldsSeq(kubeProxys) {
		if flags.Lookup(name) == nil && !strings.Contains(out.String(), "--"+name+" ") {
			t.Errorf("there is no flag --%s", name)
		}
	}
}

// docs/REFERENCE.md lists all flags and fields without effect.
func TestTheDocumentListsWhatHasNoEffect(t *testing.T) {
	text, err := os.ReadFile("../../docs/REFERENCE.md")
	if err != nil {
		t.Fatal(err)
	}
	flags := strings.Join(regexp.MustCompile(`(?m)^\|(.*)\| no effect \|`).FindAllString(string(text), -1), "")
	fields := regexp.MustCompile("(?m)^Fields without effect.*$").FindString(string(text))
	for _, n := range withoutEffect() {
		if n.flag != "" && !strings.Contains(flags, "`--"+n.flag+"`") {
			t.Errorf("no row says that --%s has no effect", n.flag)
		}
		if n.field != "" && !strings.Contains(fields, "`"+n.field+"`") {
			t.Errorf("the list of fields without effect lacks %s", n.field)
		}
	}
	want := len(withoutEffect()) + 1 // --bind-address
	for _, n := range withoutEffect() {
		if n.flag == "" {
			want--
		}
	}
	if got := strings.Count(flags, "`--"); got != want {
		t.Errorf("%d flags have no effect, want %d", got, want)
	}
}

// Settings without effect are accepted, and named once unless their value is kube-proxy's default.
func TestSettingsWithoutEffect(t *testing.T) {
	var args, want []string
	for _, n := range withoutEffect() {
		if n.flag == "" {
			continue
		}
		arg := "--" + n.flag
		if args = append(args, arg); !n.isSwitch {
			args = append(args, "some-value")
		}
		if !n.isSwitch || !slices.Contains(n.defaults, "true") {
			want = append(want, arg)
		}
	}
	named := func(o *options) (all []string) {
		for _, i := range o.ignored {
			all = append(all, i.what)
			if i.why == "" {
				t.Errorf("%s: no reason", i.what)
			}
		}
		return all
	}
	o := read(t, append(args, "--instance=edge")...)
	if diff := cmp.Diff(want, named(o)); diff != "" || o.instance != "edge" {
		t.Errorf("instance %q; settings without effect (-want +got):\n%s", o.instance, diff)
	}
	for _, n := range withoutEffect() {
		for _, value := range append(n.defaults, "", "0", "false") {
			if got := n.flag != "" && len(read(t, "--"+n.flag+"="+value).ignored) > 0; got {
				t.Errorf("--%s=%s is named, although it is kube-proxy's default", n.flag, value)
			}
		}
	}
	for args, want := range map[string]string{
		"--vmodule=a=4 --vmodule b=5":         "--vmodule",
		"--log_dir /tmp":                      "--log-dir",
		"--bind-address=192.0.2.1":            "--bind-address",
		"--bind-address=::":                   "",
		"--feature-gates=A=true,AllBeta=true": "feature gate A=true",
	} {
		if got := strings.Join(named(read(t, strings.Fields(args)...)), " "); got != want {
			t.Errorf("%s: %q has no effect, want %q", args, got, want)
		}
	}
}

// TestBadArguments: the error names the argument, and what to write.
func TestBadArguments(t *testing.T) {
	for want, all := range map[string][]string{
		"%s: want a port":                      {"--healthz-port=65536", "--metrics-port=-1"},
		"%s: want flags only":                  {"start", "-- --cleanup", "-"},
		"%s: no such flag":                     {"--log-file x --stderrthresholds", "--foo"},
		"%s: want a value of type NAME=BOOL":   {"--feature-gates=A", "--feature-gates=B=true,C=maybe"},
		"%s: want no KubeProxyIPVS=false with": {"--proxy-mode=ipvs --feature-gates=KubeProxyIPVS=false"},
		"%s: want 0 or more":                   {"--kube-api-burst=-1"},
		"%s: want application/vnd.kubernetes.protobuf or application/json": {"--kube-api-content-type=x/y"},
		"%s: want an IP address":          {"--bind-address=node-1"},
		"%s: want -1000 to 1000":          {"--oom-score-adj=-1001"},
		"%s: want text or json":           {"--logging-format=xml"},
		"--no-such: no such flag":         {"--alsologtostderr --no-such=1"},
		"flag needs an argument":          {"--manifests"},
		"--instance=--foo: want 1 to 7":   {"--instance --foo"},
		"%s: want 1 to 7":                 {"-v4 --instance=XX", "-v 4 --instance=XX"},
		"--v=x: want a value of type int": {"-vx"},
	} {
		for _, args := range all {
			fields := strings.Fields(args)
			want, err := strings.Replace(want, "%s", fields[len(fields)-1], 1), execute(t.Context(), fields, nil)
			if err == nil || !strings.Contains(err.Error(), want) || strings.Count(err.Error(), "\n") != 1 {
				t.Errorf("%s: %v, want one error with %q", args, err, want)
			}
		}
	}
}

// Feature gates that are known here switch something, or are always on.
func TestFeatureGates(t *testing.T) {
	for text, want := range map[string]struct{ off, ignored string }{
		"":                             {"", ""},
		"AllowServiceExternalIPs=true": {"", ""},
		"AllowServiceExternalIPs=false,ComponentFlagz=false": {"AllowServiceExternalIPs ComponentFlagz", ""},
		"AllBeta=false":                                {"ComponentFlagz ComponentStatusz", ""},
		"AllBeta=false,ComponentFlagz=true":            {"ComponentStatusz", ""},
		"KubeProxyIPVS=false, AllAlpha=false ,":        {"KubeProxyIPVS", ""},
		"AllAlpha=true":                                {"", "feature gate AllAlpha=true"},
		"NFTablesProxyMode=true,TopologyAwareHints=1":  {"", ""},
		"NFTablesProxyMode=false,RotateKubeletX=false": {"", "feature gate NFTablesProxyMode=false, feature gate RotateKubeletX=false"},
	} {
		g := &read(t, "--feature-gates="+text).kubeProxy.gates
		var off, ignored []string
		for _, name := range []string{gateExternalIPs, gateFlagz, gateStatusz, gateIPVS} {
			if !g.enabled(name) {
				off = append(off, name)
			}
		}
		for _, i := range g.ignored() {
			ignored = append(ignored, i.what)
		}
		if got := strings.Join(off, " "); got != want.off {
			t.Errorf("%q turns off %q, want %q", text, got, want.off)
		}
		if got := strings.Join(ignored, ", "); got != want.ignored {
			t.Errorf("%q: without effect are %q, want %q", text, got, want.ignored)
		}
	}
	if c, err := read(t, "--feature-gates=AllowServiceExternalIPs=false").config("n"); err != nil || !c.Tracker.RefuseExternalIPs {
		t.Errorf("external IPs are accepted without AllowServiceExternalIPs, error %v", err)
	}
}

// TestAddressesOfServers: OPT-02, OPT-03, OPT-32.
func TestAddressesOfServers(t *testing.T) {
	for args, want := range map[string][2]string{
		"":                           {"0.0.0.0:10256", "127.0.0.1:10249"},
		"--bind-address=192.0.2.1":   {"0.0.0.0:10256", "127.0.0.1:10249"},
		"--bind-address=::":          {"[::]:10256", "[::1]:10249"},
		"--bind-address=2001:db8::1": {"[::]:10256", "[::1]:10249"},
		"--bind-address=:: --healthz-bind-address=127.0.0.1:1 --metrics-port=0": {"127.0.0.1:1", ""},
		"--healthz-port=0 --metrics-port=0":                                     {"", ""},
		"--healthz-port=1 --metrics-port=2":                                     {"0.0.0.0:10256", "127.0.0.1:10249"},
		"--healthz-port=1 --healthz-bind-address=127.0.0.1":                     {"127.0.0.1:1", "127.0.0.1:10249"},
		"--metrics-port=2 --metrics-bind-address=::":                            {"0.0.0.0:10256", "[::]:2"},
	} {
		if o := read(t, strings.Fields(args)...); o.healthzAddress != want[0] || o.metricsAddress != want[1] {
			t.Errorf("%s: %q and %q, want %q", args, o.healthzAddress, o.metricsAddress, want)
		}
	}
}

func TestFlagsOfTheClient(t *testing.T) {
	const protobuf, text = "application/vnd.kubernetes.protobuf", "application/json"
	for args, want := range map[string]rest.Config{
		"": {QPS: 5, Burst: 10, ContentConfig: rest.ContentConfig{ContentType: protobuf, AcceptContentTypes: protobuf + "," + text}},
		"--kube-api-qps=-1 --kube-api-burst=200 --kube-api-content-type=application/json": {QPS: -1, Burst: 200, ContentConfig: rest.ContentConfig{ContentType: text, AcceptContentTypes: text}},
	} {
		var got rest.Config
		read(t, strings.Fields(args)...).kubeProxy.tuneClient(&got)
		if got.QPS != want.QPS || got.Burst != want.Burst || got.ContentConfig != want.ContentConfig {
			t.Errorf("%s: %+v, want %+v", args, got, want)
		}
	}
}

// TestAWrittenConfigurationIsRead: the file of --write-config-to means the flags that it
// was written with (OPT-35).
func TestAWrittenConfigurationIsRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	args := []string{
		"--proxy-mode=iptables", "--cluster-cidr=10.244.0.0/16,fd00::/48", "--nodeport-addresses=192.0.2.0/24,2001:db8::/32", "--masquerade-all",
		"--iptables-localhost-nodeports=false", "--ipvs-scheduler=lc", "--ipvs-exclude-cidrs=192.0.2.0/24", "--ipvs-tcp-timeout=5s", "--conntrack-min=7",
		"--conntrack-udp-timeout=77s", "--kube-api-qps=50.5", "--kube-api-content-type=application/json", "--oom-score-adj=5", "-v4", "--logging-format=json",
		"--feature-gates=A=true,ComponentFlagz=false", "--bind-address=::", "--bind-address-hard-fail", "--profiling", "--hostname-override=n", "--kubeconfig=/k",
		"--iptables-masquerade-bit=3", "--nftables-min-sync-period=2s", "--detect-local-mode=NodeCIDR", "--proxy-port-range=20000-20010", "--config-sync-period=1m",
	}
	if err := execute(t.Context(), append(args, "--write-config-to="+file), nil); err != nil {
		t.Fatal(err)
	}
	var again options
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	again.register(flags)
	again.configFile = file
	ignored, err := again.readFields(flags)
	again.complete(flags)
	text, _ := os.ReadFile(file)
	if err != nil || len(ignored) > 0 {
		t.Fatalf("read the file: %v, without effect are %v; the file:\n%s", err, ignored, text)
	}
	want := read(t, args...).kubeProxyConfiguration()
	if diff := cmp.Diff(want, again.kubeProxyConfiguration()); diff != "" {
		t.Errorf("configuration (-flags +file):\n%s\nthe file:\n%s", diff, text)
	}
	if !strings.HasPrefix(string(text), "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: iptables\n") {
		t.Errorf("the file is\n%s", text)
	}
	err = execute(t.Context(), []string{"--write-config-to=/not/there/config"}, nil)
	if err == nil || !strings.Contains(err.Error(), "write configuration: open /not/there/config") {
		t.Errorf("a directory that is not there: %v, want an error with the path", err)
	}
}
