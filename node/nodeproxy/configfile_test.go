package nodeproxy

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

func readConfig(t *testing.T, text string, args ...string) (o *options, settings []string, err error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+text), 0o600); err != nil {
		t.Fatal(err)
	}
	o = &options{}
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.register(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	o.configFile = file
	ignored, err := o.readFields(flags)
	for _, i := range ignored {
		settings = append(settings, i.what)
	}
	return o, settings, err
}

// Fields become flags, unless the command line has the flag.
func TestFieldsBecomeFlags(t *testing.T) {
	o, ignored, err := readConfig(t, `
mode: iptables
bindAddress: 0.0.0.0
clusterCIDR: 10.244.0.0/16,fd00:244::/48
detectLocalMode: ""
nodePortAddresses: [192.0.2.0/24, "::/0"]
clientConnection: {kubeconfig: /etc/kubeconfig, qps: 50, burst: 0, contentType: application/json, acceptContentTypes: application/json}
featureGates: {AllowServiceExternalIPs: false, Unknown: true}
logging: {format: json, verbosity: 4, flushFrequency: 5s, vmodule: [{filePattern: a, verbosity: 9}], options: {json: {infoBufferSize: "0"}, text: {splitStream: true}}}
configSyncPeriod: 0s
conntrack: {maxPerCore: 0, min: null, tcpEstablishedTimeout: 1h, tcpBeLiberal: true}
iptables: {masqueradeAll: true, masqueradeBit: 3, localhostNodePorts: false, syncPeriod: 7s, minSyncPeriod: 0s}
nftables: {masqueradeAll: false, masqueradeBit: null}
ipvs: {scheduler: lc, strictARP: true, excludeCIDRs: null, tcpTimeout: 0s}
winkernel: {enableDSR: true, networkName: ""}
oomScoreAdj: 0
udpIdleTimeout: 250ms
bindAddressHardFail: true
showHiddenMetricsForVersion: "1.36"
`, "--iptables-masquerade-bit=5")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{
		"clientConnection.acceptContentTypes", "logging.vmodule", "logging.options.text.splitStream", "winkernel.enableDSR", "showHiddenMetricsForVersion",
	}; !slices.Equal(ignored, want) {
		t.Errorf("ignored are %q, want %q", ignored, want)
	}
	for what, ok := range map[string]bool{
		"mode":                  o.proxyMode == "iptables",
		"clusterCIDR":           o.clusterCIDR == "10.244.0.0/16,fd00:244::/48",
		"detectLocalMode":       o.detectLocalMode == "ClusterCIDR",
		"nodePortAddresses":     slices.Equal(o.nodePortAddresses, []string{"192.0.2.0/24", "::/0"}),
		"kubeconfig":            o.kubeconfig == "/etc/kubeconfig",
		"configSyncPeriod":      o.configSyncPeriod == 15*time.Minute,
		"maxPerCore":            o.conntrack.MaxPerCore == 0,
		"min":                   o.conntrack.Min == 131072,
		"tcpEstablishedTimeout": o.conntrack.TCPEstablished == time.Hour,
		"tcpBeLiberal":          o.conntrack.TCPBeLiberal,
		"masqueradeAll":         o.masqueradeAll,
		"masqueradeBit":         o.iptables.masqueradeBit == 5,
		"localhostNodePorts":    !o.localhostNodePorts,
		"syncPeriod":            o.iptables.syncPeriod == 7*time.Second,
		"minSyncPeriod":         o.iptables.minSyncPeriod == time.Second,
		"nftables":              o.nftables.masqueradeBit == 14,
		"qps, burst and type":   o.kubeProxy.apiQPS == 50 && o.kubeProxy.apiBurst == 10 && o.kubeProxy.apiContentType == "application/json",
		"featureGates":          o.kubeProxy.gates.String() == "AllowServiceExternalIPs=false,Unknown=true",
		"logging":               o.kubeProxy.logFormat == "json" && o.verbosity == 4,
		"oomScoreAdj":           o.kubeProxy.oomScoreAdj == 0,
		"udpIdleTimeout":        o.userspace.udpTimeout == 250*time.Millisecond,
		"bindAddressHardFail":   o.kubeProxy.hardFail,
		"scheduler":             o.ipvs.scheduler == "lc" && o.ipvs.strictARP,
	} {
		if !ok {
			t.Errorf("%s is not as the file, or the command line, says: %+v", what, o)
		}
	}
}

// For settings that have one flag, the mode's own section counts, whether the mode is in the file or on the command
// line. What the other section says is named.
func TestTheModesOwnSectionCounts(t *testing.T) {
	sections := map[mode]string{modeNFTables: "nftables", modeEBPF: "nftables", modeIPTables: "iptables", modeIPVS: "iptables", modeUserspace: "nftables"}
	for _, m := range modes() {
		for _, section := range []string{"nftables", "iptables"} {
			other := map[string]string{"nftables": "iptables", "iptables": "nftables"}[section]
			values := section + ": {masqueradeAll: true}\n" + other + ": {masqueradeAll: false}\n"
			own := section == sections[m]
			for what, file := range map[string]struct {
				text string
				args []string
			}{
				"mode before":         {"mode: " + string(m) + "\n" + values, nil},
				"mode after":          {values + "mode: " + string(m) + "\n", nil},
				"mode by flag":        {values + "mode: kernelspace\n", []string{"--proxy-mode=" + string(m)}},
				"other section first": {other + ": {masqueradeAll: false}\n" + section + ": {masqueradeAll: true}\nmode: " + string(m), nil},
			} {
				o, ignored, err := readConfig(t, file.text, file.args...)
				if err != nil || o.masqueradeAll != own || slices.Contains(ignored, section+".masqueradeAll") == own {
					t.Errorf("mode %s, %s, only %s.masqueradeAll is true: masqueradeAll = %t, without effect are %q, error %v; want %t", m, what, section, o.masqueradeAll, ignored, err, own)
				}
				var shown struct {
					Nftables, Iptables struct {
						MasqueradeAll bool `yaml:"masqueradeAll"`
					}
				}
				if err := o.kubeProxyConfiguration().Decode(&shown); err != nil {
					t.Fatal(err)
				}
				if got := map[string]bool{"nftables": shown.Nftables.MasqueradeAll, "iptables": shown.Iptables.MasqueradeAll}; got[section] != own || got[other] {
					t.Errorf("mode %s, %s: /configz shows %v, want the mode's section alone", m, what, got)
				}
			}
			if o, _, err := readConfig(t, values+"mode: "+string(m), "--masquerade-all=false"); err != nil || o.masqueradeAll {
				t.Errorf("mode %s, --masquerade-all=false: masqueradeAll = %t, error %v", m, o.masqueradeAll, err)
			}
		}
	}
	if o, _, err := readConfig(t, "mode: iptables\n---\n"); err != nil || o.mode() != modeIPTables {
		t.Errorf("an empty second document: mode %s, error %v", o.mode(), err)
	}
	if o, _, err := readConfig(t, "mode: userspace\niptables: {masqueradeAll: true}", "--userspace-portals=iptables"); err != nil || !o.masqueradeAll {
		t.Errorf("portals of iptables: masqueradeAll = %t, error %v", o.masqueradeAll, err)
	}
}

// TestTheKindMustBeKubeProxys.
func TestTheKindMustBeKubeProxys(t *testing.T) {
	for text, want := range map[string]string{
		"apiVersion: v1\nkind: KubeProxyConfiguration":                     `:1: apiVersion is "v1"`,
		"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: Pod\nmode: x": `:2: kind is "Pod"`,
		"":        "want a KubeProxyConfiguration",
		"[a, b]":  "want a KubeProxyConfiguration",
		"a: [":    ":1: did not find expected node content",
		"a: b: c": ": mapping values are not allowed in this context",
	} {
		file := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		flags, o := pflag.NewFlagSet("test", pflag.ContinueOnError), &options{}
		o.register(flags)
		o.configFile = file
		if _, err := o.readFields(flags); err == nil || !strings.HasPrefix(err.Error(), file+":") || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with the file and %q", text, err, want)
		}
	}
}

// Fields share no flag, so that no field overrides another one, except for a section of each mode.
func TestFieldsShareNoFlag(t *testing.T) {
	fields := map[string]string{}
	for field, flag := range flagsOfFields() {
		if other := fields[flag]; other != "" && flag != "masquerade-all" {
			t.Errorf("%s and %s both set --%s", field, other, flag)
		}
		fields[flag] = field
	}
}

// Duplicates are named with their lines, at any depth, whether the field has an effect or not.
func TestDuplicatesAreNamed(t *testing.T) {
	for text, want := range map[string]string{
		"mode: iptables\nmode: ipvs":                                     `config.yaml:4: mapping key "mode" already defined at line 3`,
		"iptables:\n  syncPeriod: 1s\n  syncPeriod: 2s":                  `config.yaml:5: mapping key "syncPeriod" already defined at line 4`,
		"iptables: {syncPeriod: 1s}\nmode: ipvs\niptables: {}":           `config.yaml:5: mapping key "iptables" already defined at line 3`,
		"featureGates:\n  A: true\n  A: false":                           `config.yaml:5: mapping key "A" already defined at line 4`,
		"winkernel:\n  enableDSR: true\n  enableDSR: false":              `config.yaml:5: mapping key "enableDSR" already defined at line 4`,
		"logging: {options: {json: {a: 1}, json: {a: 2}}}":               `config.yaml:3: mapping key "json" already defined at line 3`,
		"mode: iptables\n\"mode\": ipvs\nclusterCIDR: a\nclusterCIDR: b": `config.yaml:6: mapping key "clusterCIDR" already defined at line 5`,
		"kind: KubeProxyConfiguration":                                   `config.yaml:3: mapping key "kind" already defined at line 2`,
		"mode: ipvs\n---\nmode: iptables":                                "config.yaml:4: a second document begins: want one",
	} {
		if _, _, err := readConfig(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", text, err, want)
		}
	}
}

// Unknown fields are named with their lines, and do not stop the proxy, as with kube-proxy.
func TestUnknownFieldsAreNamed(t *testing.T) {
	for text, want := range map[string]string{
		"modes: iptables":                   "config.yaml:3: modes",
		"ipvs: {schedular: rr}":             "config.yaml:3: ipvs.schedular",
		"metadata:\n  name: kube-proxy":     "config.yaml:3: metadata",
		"iptables:\n  masqueradeBits: 1":    "config.yaml:4: iptables.masqueradeBits",
		"mode: ipvs\nfuture: [1, {a: [b]}]": "config.yaml:4: future",
	} {
		if _, ignored, err := readConfig(t, text); err != nil || len(ignored) != 1 || !strings.HasSuffix(ignored[0], want) {
			t.Errorf("%q: without effect are %q, error %v, want %q", text, ignored, err, want)
		}
	}
}

// A file may have what kube-proxy accepts.
func TestWhatAFileMayHave(t *testing.T) {
	for text, ok := range map[string]func(o *options) bool{
		"iptables:\nnftables: ~\nipvs: null\nconntrack:\nwinkernel:\nclientConnection:\nlogging:\ndetectLocal:": func(o *options) bool { return o.iptables.masqueradeBit == 14 },
		"iptables: {}\nfeatureGates:\nnodePortAddresses:\nmode:":                                                func(o *options) bool { return o.mode() == modeNFTables },
		"enableProfiling: yes":                                                                     func(o *options) bool { return o.profiling },
		"enableProfiling: On\nbindAddressHardFail: Y":                                              func(o *options) bool { return o.profiling && o.kubeProxy.hardFail },
		"iptables: {localhostNodePorts: off}":                                                      func(o *options) bool { return !o.localhostNodePorts },
		"iptables: {localhostNodePorts: NO, masqueradeAll: yes}\nmode: iptables":                   func(o *options) bool { return !o.localhostNodePorts && o.masqueradeAll },
		"featureGates: {AllowServiceExternalIPs: off, B: yes}":                                     func(o *options) bool { return o.kubeProxy.gates.String() == "AllowServiceExternalIPs=false,B=true" },
		"iptables: &x {syncPeriod: 7s}\nipvs: *x":                                                  func(o *options) bool { return o.ipvs.syncPeriod == 7*time.Second },
		"clusterCIDR: &c 10.0.0.0/8\nnodePortAddresses: [*c]":                                      func(o *options) bool { return slices.Equal(o.nodePortAddresses, []string{"10.0.0.0/8"}) },
		"iptables: &x {syncPeriod: 7s, masqueradeBit: 3}\nnftables:\n  masqueradeBit: 5\n  <<: *x": func(o *options) bool { return o.nftables.syncPeriod == 7*time.Second && o.nftables.masqueradeBit == 5 },
		"iptables: &x {syncPeriod: 7s}\nipvs: &y {minSyncPeriod: 2s, syncPeriod: 9s}\nnftables: {<<: [*x, *y]}": func(o *options) bool {
			return o.nftables.syncPeriod == 7*time.Second && o.nftables.minSyncPeriod == 2*time.Second
		},
	} {
		o, ignored, err := readConfig(t, text)
		if err != nil || len(ignored) > 0 || !ok(o) {
			t.Errorf("%q: error %v, without effect are %q, or not as the file says: %+v", text, err, ignored, o)
		}
	}
}

// TestBadValuesOfAFile: each error has the file, the line, the field and what to write, through the
// whole program, whether the value cannot be parsed or is not allowed.
func TestBadValuesOfAFile(t *testing.T) {
	for text, want := range map[string]string{
		"mode: {a: b}":                                   "3: mode: want a single value",
		"mode: [a]":                                      "3: mode: want a single value",
		"conntrack:\n  min: [1, {}]":                     "4: conntrack.min: want a whole number",
		"conntrack:\n  min: some":                        "4: conntrack.min: some: want a whole number",
		"iptables:\n  syncPeriod: x":                     "4: iptables.syncPeriod: x: want a duration such as 30s",
		"iptables:\n  syncPeriod: 30":                    "4: iptables.syncPeriod: 30: want a duration such as 30s",
		"iptables: [1]":                                  "3: iptables: want fields such as localhostNodePorts, or nothing",
		"conntrack: 5":                                   "3: conntrack: want fields such as maxPerCore, or nothing",
		"enableProfiling: maybe":                         "3: enableProfiling: maybe: want true or false",
		"enableProfiling: 'yes'":                         "3: enableProfiling: yes: want true or false",
		"nodePortAddresses: [[a]]":                       "3: nodePortAddresses: want a list such as [a, b]",
		"nodePortAddresses: {a: b}":                      "3: nodePortAddresses: want a list such as [a, b]",
		"clientConnection: {qps: fast}":                  "3: clientConnection.qps: fast: want a number",
		"featureGates: {A: 1x}":                          "3: featureGates: A=1x: want names with true or false",
		"featureGates: {A: [true]}":                      "3: featureGates: want names with true or false",
		"mode: a":                                        "3: mode: --proxy-mode=a: want nftables",
		"mode: iptables\niptables:\n  masqueradeBit: 99": "5: iptables.masqueradeBit: --iptables-masquerade-bit=99: want 0 to 31",
		"clusterCIDR: 10.0.0.0":                          "3: clusterCIDR: --cluster-cidr=10.0.0.0: want a range",
		"nodePortAddresses:\n- here":                     "4: nodePortAddresses: --nodeport-addresses=here: want ranges",
		"a: &x {b: *x}":                                  ": anchor 'x' value contains itself",
		"mode: *y":                                       ": unknown anchor 'y' referenced",
		"mode: ipvs\n  a: b":                             "4: mapping values are not allowed in this context",
		"iptables: {<<: 5}":                              "map merge requires map or sequence of maps as the value",
	} {
		file := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(file, []byte("apiVersion: "+configVersion+"\nkind: "+configKind+"\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := execute(t.Context(), []string{"--config", file}, nil)
		if err == nil || !strings.Contains(err.Error(), file+":"+strings.TrimPrefix(want, ":")) && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", text, err, want)
			continue
		}
		if !strings.Contains(err.Error(), file+":") || strings.Count(err.Error(), "\n") != 1 {
			t.Errorf("%q: %v, want one error, which names the file", text, err)
		}
	}
}

func TestEveryFieldHasAFlag(t *testing.T) {
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	(&options{}).register(flags)
	for field, flag := range flagsOfFields() {
		if flags.Lookup(flag) == nil {
			t.Errorf("%s: there is no flag --%s", field, flag)
		}
	}
}
