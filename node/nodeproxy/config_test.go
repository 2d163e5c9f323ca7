package nodeproxy

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// parse parses flags.
func parse(t *testing.T, args ...string) *options {
	t.Helper()
	var o options
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.register(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatalf("parse %q: %v", args, err)
	}
	return &o
}

// byDefault returns the configuration without flags.
func byDefault() proxier.Config {
	return proxier.Config{
		Node:       changetracker.Node{Name: "node-1"},
		Names:      proxier.KubeProxyNames(),
		Runner:     runner.Options{MinInterval: 10 * time.Millisecond, Retry: runner.Backoff{Max: 30 * time.Second}}, // OPT-06, OPT-07
		Masquerade: proxier.Masquerade{Mark: 0x4000},                                                                 // OPT-09
		NodePorts:  proxier.NodePorts{Primary: true},                                                                 // NPA-06
	}
}

// The log says once that pods are not recognized, unless that does not matter.
func TestTheLogSaysThatPodsAreNotRecognized(t *testing.T) {
	t.Parallel()
	for flags, want := range map[string]int{
		"": 1, "--detect-local-mode=": 1, "--detect-local-mode=ClusterCIDR": 1, "--cluster-cidr=,": 1, "--proxy-mode=ipvs": 1,
		"--cluster-cidr=10.244.0.0/16": 0, "--detect-local-mode=NodeCIDR": 0, "--masquerade-all": 0, "--proxy-mode=userspace": 0,
		"--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0": 0, "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=veth": 0,
	} {
		core, logs := observer.New(zap.InfoLevel)
		parse(t, strings.Fields(flags)...).logDetection(zap.New(core))
		if got := logs.FilterMessageSnippet("pods are not recognized").Len(); got != want || logs.Len() != want {
			t.Errorf("%q: the log has %d such lines of %d, want %d", flags, got, logs.Len(), want)
		}
	}
}

func TestFlagsBecomeConfiguration(t *testing.T) {
	cidr := netip.MustParsePrefix
	for rule, c := range map[string]struct {
		args string
		want func(c *proxier.Config)
	}{
		"defaults":   {"", func(*proxier.Config) {}},
		"blank mode": {"--proxy-mode= --detect-local-mode=", func(*proxier.Config) {}},
		"LTD-01 both families": {"--cluster-cidr=fd00::/48,10.244.0.0/16", func(c *proxier.Config) {
			c.Masquerade.PodCIDRs = []netip.Prefix{cidr("fd00::/48"), cidr("10.244.0.0/16")}
		}},
		"LTD-07 skipped and masked": {"--cluster-cidr=,10.244.1.1/16,", func(c *proxier.Config) { c.Masquerade.PodCIDRs = []netip.Prefix{cidr("10.244.0.0/16")} }},
		"LTD-02":                    {"--detect-local-mode=NodeCIDR --cluster-cidr=10.244.0.0/16", func(c *proxier.Config) { c.Masquerade.NodePodCIDRs = true }},
		"LTD-03":                    {"--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0", func(c *proxier.Config) { c.Masquerade.PodInterface = "cni0" }},
		"LTD-04":                    {"--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=veth", func(c *proxier.Config) { c.Masquerade.PodInterfacePrefix = "veth" }},
		"OPT-10":                    {"--masquerade-all", func(c *proxier.Config) { c.Masquerade.All = true }},
		"VAL-01 the last bit":       {"--nftables-masquerade-bit=31", func(c *proxier.Config) { c.Masquerade.Mark = 1 << 31 }},
		"VAL-01 the first bit":      {"--nftables-masquerade-bit=0", func(c *proxier.Config) { c.Masquerade.Mark = 1 }},
		"NPA-05 primary":            {"--nodeport-addresses=primary", func(*proxier.Config) {}},
		"NPA-01 ranges": {"--nodeport-addresses=192.0.2.0/24 --nodeport-addresses=::/0", func(c *proxier.Config) {
			c.NodePorts = proxier.NodePorts{Addresses: []netip.Prefix{cidr("192.0.2.0/24"), cidr("::/0")}}
		}},
		"NPA-07 mixed": {"--nodeport-addresses=primary,localhost,192.0.2.0/24", func(c *proxier.Config) {
			c.NodePorts = proxier.NodePorts{Primary: true, Localhost: true, Addresses: []netip.Prefix{cidr("192.0.2.0/24")}}
		}},
		"NPA-07 all": {"--nodeport-addresses=all,localhost", func(c *proxier.Config) {
			c.NodePorts = proxier.NodePorts{Localhost: true, Addresses: []netip.Prefix{cidr("0.0.0.0/0"), cidr("::/0")}}
		}},
		"external IPs": {"--refuse-external-ips --denied-external-ips=192.0.2.0/24,2001:db8::/32", func(c *proxier.Config) {
			c.Tracker.RefuseExternalIPs, c.Tracker.DeniedExternalIPs = true, []netip.Prefix{cidr("192.0.2.0/24"), cidr("2001:db8::/32")}
		}},
		"external IPs of the node": {"--denied-external-ips=node-addresses", func(c *proxier.Config) { c.DenyNodeExternalIPs = true }},
		"external IPs of nodes": {"--denied-external-ips=192.0.2.0/24,node-addresses", func(c *proxier.Config) {
			c.DenyNodeExternalIPs, c.Tracker.DeniedExternalIPs = true, []netip.Prefix{cidr("192.0.2.0/24")}
		}},
		"source ranges":        {"--strict-source-ranges", func(c *proxier.Config) { c.Tracker.StrictSourceRanges = true }},
		"no least time (W-30)": {"--nftables-min-sync-period=0", func(c *proxier.Config) { c.Runner.MinInterval = runner.Unlimited }},
		"longest retry":        {"--nftables-sync-period=5s", func(c *proxier.Config) { c.Runner.Retry.Max = 5 * time.Second }},
		"longest retry is the first": {"--nftables-min-sync-period=0 --nftables-sync-period=20ms", func(c *proxier.Config) {
			c.Runner = runner.Options{MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: 20 * time.Millisecond, Max: 20 * time.Millisecond}}
		}},
		"NPA-06 iptables":            {"--proxy-mode=iptables", func(c *proxier.Config) { c.NodePorts, c.Runner.MinInterval = proxier.NodePorts{}, time.Second }},
		"NPA-05 primary in iptables": {"--proxy-mode=iptables --nodeport-addresses=primary", func(c *proxier.Config) { c.Runner.MinInterval = time.Second }},
		"NPA-06 userspace":           {"--proxy-mode=userspace", func(c *proxier.Config) { c.NodePorts = proxier.NodePorts{} }},
		"NPA-06 ipvs": {"--proxy-mode=ipvs --iptables-masquerade-bit=3 --ipvs-min-sync-period=2s --ipvs-sync-period=7s", func(c *proxier.Config) {
			c.NodePorts = proxier.NodePorts{}
			c.Masquerade.Mark, c.Runner.MinInterval, c.Runner.Retry.Max = 1<<3, 2*time.Second, 7*time.Second
		}},
		"portals have their own": {
			"--proxy-mode=userspace --userspace-portals=iptables --nodeport-addresses=primary --iptables-masquerade-bit=3",
			func(c *proxier.Config) { c.Masquerade.Mark, c.Runner.MinInterval = 1<<3, time.Second },
		},
		"each mode has its own": {"--proxy-mode=iptables --nodeport-addresses=primary --iptables-masquerade-bit=3 --nftables-masquerade-bit=5 " +
			"--iptables-min-sync-period=2s --iptables-sync-period=7s --nftables-sync-period=9s", func(c *proxier.Config) {
			c.Masquerade.Mark, c.Runner.MinInterval, c.Runner.Retry.Max = 1<<3, 2*time.Second, 7*time.Second
		}},
		"a name of its own": {"--instance=edge --nftables-masquerade-bit=15", func(c *proxier.Config) {
			c.Names, _ = proxier.NamesFor("edge")
			c.Masquerade.Mark = 0x8000
		}},
	} {
		t.Run(rule, func(t *testing.T) {
			o := parse(t, strings.Fields(c.args)...)
			if err := o.Validate(); err != nil {
				t.Errorf("Validate = %v, want nil", err)
			}
			got, err := o.config("node-1")
			want := byDefault()
			want.LeastConnections = !strings.Contains(c.args, "--proxy-mode=userspace") && !strings.Contains(c.args, "--proxy-mode=ipvs") // PKT-93
			c.want(&want)
			if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.IgnoreFields(changetracker.Options{}, "Select", "DecorateService", "DecorateEndpoint", "EqualExt", "Now")); diff != "" || err != nil {
				t.Errorf("config error %v, difference (-want +got):\n%s", err, diff)
			}
			if err := got.WithDefaults().Validate(); err != nil {
				t.Errorf("the engine refuses the configuration: %v", err)
			}
		})
	}
}

func TestInvalidValues(t *testing.T) {
	for args, want := range map[string]string{
		"--nftables-masquerade-bit=-1":                                                  "--nftables-masquerade-bit=-1: want 0 to 31",
		"--detect-local-mode=Guess":                                                     "--detect-local-mode=Guess: want ClusterCIDR, NodeCIDR",
		"--detect-local-mode=BridgeInterface":                                           "--pod-bridge-interface=: want 1 to 15 bytes", // VAL-06
		"--detect-local-mode=InterfaceNamePrefix":                                       "--pod-interface-name-prefix=: want 1 to 15 bytes",
		"--detect-local-mode=BridgeInterface --pod-bridge-interface=a-very-long-bridge": "--pod-bridge-interface=a-very-long-bridge: want 1 to 15 bytes",
		`--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=ve"th`:     `--pod-interface-name-prefix=ve"th: want 1 to 15 bytes`,
		"--detect-local-mode=BridgeInterface --pod-bridge-interface=cni+":               "--pod-bridge-interface=cni+: want 1 to 15 bytes",
		"--cluster-cidr=10.0.0.0":                                                       "--cluster-cidr=10.0.0.0: want a range",
		"--cluster-cidr=10.0.0.0/8,fd00::/8,11.0.0.0/8":                                 "or one of each IP family",
		"--denied-external-ips=192.0.2.1":                                               "--denied-external-ips=192.0.2.1: want ranges",
		"--denied-external-ips=node-addresses,Node-Addresses":                           "--denied-external-ips=node-addresses,Node-Addresses: want ranges such as 10.0.0.0/8, or node-addresses",
		"--nodeport-addresses=192.0.2.1":                                                "--nodeport-addresses=192.0.2.1: want ranges",
		"--nftables-min-sync-period=-1s":                                                "--nftables-min-sync-period=-1s: want 0 to 1h",
		"--nftables-min-sync-period=31s":                                                "--nftables-sync-period=30s: want at least 1ms and --nftables-min-sync-period=31s", // VAL-02
		"--nftables-min-sync-period=2h --nftables-sync-period=3h":                       "--nftables-min-sync-period=2h0m0s: want 0 to 1h",
		"--nftables-min-sync-period=0 --nftables-sync-period=0":                         "--nftables-sync-period=0s: want at least 1ms",
		"--config-sync-period=0":                                                        "--config-sync-period=0s: want more than 0",
		"--conntrack-tcp-timeout-established=999ms":                                     "--conntrack-tcp-timeout-established=999ms: want 0, or 1s", // SYS-11
		"--conntrack-tcp-timeout-close-wait=-1s":                                        "--conntrack-tcp-timeout-close-wait=-1s: want 0, or 1s",
		"--proxy-port-range=5-4":                                                        "--proxy-port-range=5-4: want two ports",
		"--ipvs-exclude-cidrs=10.0.0.1":                                                 "--ipvs-exclude-cidrs=10.0.0.1: want ranges",
		"--ipvs-scheduler-flags=fallback,source":                                        "--ipvs-scheduler-flags=fallback,source: want fallback, port or ops",
		"--ipvs-tcp-timeout=1500ms":                                                     "--ipvs-tcp-timeout=1.5s: want whole seconds",
		"--ipvs-udp-timeout=-1s":                                                        "--ipvs-udp-timeout=-1s: want whole seconds",
		"--ipvs-min-sync-period=-1s":                                                    "--ipvs-min-sync-period=-1s: want 0 to 1h",
		"--udp-timeout=0":                                                               "--udp-timeout=0s: want more than 0",
		"--userspace-portals=ipvs":                                                      "--userspace-portals=ipvs: want nftables or iptables",
		"--conntrack-max-per-core=-1":                                                   "--conntrack-max-per-core=-1: want 0 or more",
	} {
		if err := parse(t, strings.Fields(args)...).Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Validate %s = %v, want an error with %q", args, err, want)
		}
	}
}

// TestBindAddresses: OPT-02, OPT-03, VAL-03, without W-31.
func TestBindAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "0.0.0.0": "0.0.0.0:99", "192.0.2.1:80": "192.0.2.1:80", "::": "[::]:99", "[::]": "[::]:99", "[::1]:65535": "[::1]:65535",
	} {
		if got, err := bindAddress(text, 99); got != want || err != nil {
			t.Errorf("bindAddress(%q) = %q, %v, want %q", text, got, err, want)
		}
	}
	for _, text := range []string{"localhost", "1.2.3.4:0", "1.2.3.4:65536", "1.2.3.4:", ":80", "::1:"} {
		if got, err := bindAddress(text, 99); err == nil {
			t.Errorf("bindAddress(%q) = %q, want an error", text, got)
		}
	}
}

// TestNodeName: NODE-01.
func TestNodeName(t *testing.T) {
	if got, err := parse(t, "--hostname-override", " Node-1\n").nodeName(); got != "node-1" || err != nil {
		t.Errorf("nodeName = %q, %v, want node-1", got, err)
	}
	if got, err := parse(t).nodeName(); got == "" || got != strings.ToLower(got) || err != nil {
		t.Errorf("nodeName = %q, %v, want the host name in lower case", got, err)
	}
}
