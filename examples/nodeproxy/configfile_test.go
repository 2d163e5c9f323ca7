package main

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
	ignored, err := readConfigFile(file, flags)
	for _, i := range ignored {
		settings = append(settings, i.what)
	}
	return o, settings, err
}

// TestFieldsBecomeFlags, unless the command line has the flag.
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

// TestUnknownFieldsAreNamed with their lines.
func TestUnknownFieldsAreNamed(t *testing.T) {
	for text, want := range map[string]string{
		"modes: iptables":               "config.yaml:3: modes: unknown field",
		"ipvs: {schedular: rr}":         "config.yaml:3: ipvs.schedular: unknown field",
		"conntrack:\n  min: [1, {}]":    "invalid argument",
		"mode: {a: b}":                  "config.yaml:3: mode: want a single value",
		"iptables:\n  syncPeriod: x":    "config.yaml:4: iptables.syncPeriod",
		"featureGates: {A: 1x}":         "A=1x",
		"iptables: {masqueradeBits: 1}": "iptables.masqueradeBits: unknown field",
		"kind: Pod":                     `config.yaml:3: kind is "Pod"`,
	} {
		if _, _, err := readConfig(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want an error with %q", text, err, want)
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
