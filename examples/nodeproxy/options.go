package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/serviceplane/serviceplane/conntrack"
)

// options are what the flags say. The names and defaults are kube-proxy's, but for
// the last ones.
type options struct {
	configFile                              string
	ignored                                 []string // fields of the file
	proxyMode, kubeconfig, master, hostname string

	clusterCIDR, detectLocalMode, podBridge, podPrefix string
	masqueradeAll                                      bool
	refuseExternalIPs, strictSourceRanges              bool
	deniedExternalIPs                                  []string
	nodePortAddresses                                  []string
	nftables, iptables                                 tuning
	localhostNodePorts                                 bool
	ipvs                                               virtualServers
	userspace                                          sockets

	configSyncPeriod               time.Duration
	healthzAddress, metricsAddress string
	debugAddress, traceEndpoint    string
	allowedHosts                   []string
	profiling                      bool
	conntrack                      conntrack.SysctlOptions
	verbosity                      int
	cleanup                        bool

	manifests, instance, stateDir string
}

func (o *options) register(f *pflag.FlagSet) {
	f.StringVar(&o.configFile, "config", "", "file with a KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1); other flags win over it")
	f.StringVar(&o.proxyMode, "proxy-mode", string(modeNFTables), "engine to use: nftables, iptables, ipvs or userspace")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "file that says how to reach the API server; without it and --master, the pod's own service account")
	f.StringVar(&o.master, "master", "", "address of the API server, instead of the kubeconfig's")
	f.StringVar(&o.hostname, "hostname-override", "", "name of this node; default is the host's name")
	f.StringVar(&o.clusterCIDR, "cluster-cidr", "", "ranges of all pods, one per IP family, separated by a comma; for --detect-local-mode=ClusterCIDR")
	f.StringVar(&o.detectLocalMode, "detect-local-mode", string(byClusterCIDR), "how to tell this node's pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	f.StringVar(&o.podBridge, "pod-bridge-interface", "", "the pods' bridge, for --detect-local-mode=BridgeInterface")
	f.StringVar(&o.podPrefix, "pod-interface-name-prefix", "", "what the names of the pods' interfaces begin with, for --detect-local-mode=InterfaceNamePrefix")
	f.BoolVar(&o.masqueradeAll, "masquerade-all", false, "replace the source of everything sent to cluster IPs")
	f.BoolVar(&o.refuseExternalIPs, "refuse-external-ips", false, "ignore spec.externalIPs of all Services")
	f.StringSliceVar(&o.deniedExternalIPs, "denied-external-ips", nil, "ranges that no external IP may be in, beside those of pods, loopback, link-local and multicast; \"node-addresses\" for the addresses of this node")
	f.BoolVar(&o.strictSourceRanges, "strict-source-ranges", false, "close a load balancer address whose source ranges have no valid one of its IP family, instead of opening it to everybody")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", nil, "ranges of the node's addresses that accept node ports, or \"primary\"; default is primary with nftables, and all with the others")
	o.nftables.register(f, modeNFTables)
	o.iptables.register(f, modeIPTables)
	f.BoolVar(&o.localhostNodePorts, "iptables-localhost-nodeports", true, "accept node ports on 127.0.0.0/8 too")
	o.ipvs.register(f)
	o.userspace.register(f)
	f.DurationVar(&o.configSyncPeriod, "config-sync-period", 15*time.Minute, "how often everything known of the API server is gone through again")
	f.StringVar(&o.healthzAddress, "healthz-bind-address", "0.0.0.0:10256", "address of the health server; empty for none")
	f.StringVar(&o.metricsAddress, "metrics-bind-address", "127.0.0.1:10249", "address of the metrics server; empty for none")
	f.IntVarP(&o.verbosity, "v", "v", 0, "verbosity of the log; 4 and more is for debugging")
	f.BoolVar(&o.cleanup, "cleanup", false, "remove this instance's rules, restore the kernel settings that it changed, and exit")
	f.BoolVar(&o.profiling, "profiling", false, "serve /debug/pprof/ at --metrics-bind-address")
	registerConntrack(f, &o.conntrack)
	f.StringVar(&o.manifests, "manifests", "", "directory of YAML and JSON files (16 MiB each, 64 MiB together at most) with Services, EndpointSlices and Nodes, instead of an API server")
	f.StringVar(&o.instance, "instance", "", "name of this proxy among several on a node; give each its own masquerade bit; default is kube-proxy's place")
	f.StringVar(&o.traceEndpoint, "trace-otlp-endpoint", "", "URL of a collector to send traces to, by OTLP over HTTP, such as http://127.0.0.1:4318; empty for none")
	f.StringVar(&o.debugAddress, "debug-bind-address", "", "address and port of a page that shows Services and explains packets; best one of loopback, as it tells everything to everybody; empty for none")
	f.StringSliceVar(&o.allowedHosts, "allowed-hosts", nil, "names that clients may ask the metrics and debug servers by, beside IP addresses and localhost; \"*\" for any name")
	f.StringVar(&o.stateDir, "state-dir", "/run/serviceplane", "directory to remember changed kernel settings in")
}

func registerConntrack(f *pflag.FlagSet, c *conntrack.SysctlOptions) {
	f.Int32Var(&c.MaxPerCore, "conntrack-max-per-core", 32768, "connections to track, per CPU; 0 leaves the limit as it is")
	f.Int32Var(&c.Min, "conntrack-min", 131072, "connections to track at least, whatever --conntrack-max-per-core")
	f.BoolVar(&c.LowerMax, "conntrack-lower-max", false, "lower the number of connections to track too, if it is higher")
	f.DurationVar(&c.TCPEstablished, "conntrack-tcp-timeout-established", 24*time.Hour, "how long to remember idle TCP connections; 0 leaves it as it is")
	f.DurationVar(&c.TCPCloseWait, "conntrack-tcp-timeout-close-wait", time.Hour, "how long to remember half-closed TCP connections; 0 leaves it as it is")
	f.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "take TCP packets outside of the window for valid")
	f.DurationVar(&c.UDP, "conntrack-udp-timeout", 0, "how long to remember an unanswered UDP flow; 0 leaves it as it is")
	f.DurationVar(&c.UDPStream, "conntrack-udp-timeout-stream", 0, "how long to remember an answered UDP flow; 0 leaves it as it is")
}

// register registers the flags that each mode has of its own.
func (t *tuning) register(f *pflag.FlagSet, m mode) {
	prefix := string(m)
	f.IntVar(&t.masqueradeBit, prefix+"-masquerade-bit", 14, "bit of the packet mark that means masquerading, 0 to 31")
	f.DurationVar(&t.minSyncPeriod, prefix+"-min-sync-period", time.Second, "least time between syncs; 0 is none")
	f.DurationVar(&t.syncPeriod, prefix+"-sync-period", 30*time.Second, "longest time between retries of a failed sync")
}

func (t *tuning) validate(f *faults, m mode) {
	prefix := string(m)
	f.check(t.masqueradeBit >= 0 && t.masqueradeBit <= 31, prefix+"-masquerade-bit", t.masqueradeBit, "0 to 31")
	f.check(t.minSyncPeriod >= 0 && t.minSyncPeriod <= time.Hour, prefix+"-min-sync-period", t.minSyncPeriod, "0 to 1h")
	f.check(t.syncPeriod >= max(t.minSyncPeriod, time.Millisecond), prefix+"-sync-period", t.syncPeriod,
		fmt.Sprintf("1ms or more, and no less than --%s-min-sync-period=%v", prefix, t.minSyncPeriod))
}

// Validate reports every flag that is wrong, with its value and what it may be.
func (o *options) Validate() error {
	var f faults
	f.check(isMode(o.proxyMode), "proxy-mode", o.proxyMode, "nftables, iptables, ipvs or userspace")
	f.check(o.hostname == "" || strings.TrimSpace(o.hostname) != "", "hostname-override", o.hostname, "a name, or nothing for the host's own")
	if o.manifests != "" {
		f.check(o.kubeconfig == "", "kubeconfig", o.kubeconfig, "nothing beside --manifests")
		f.check(o.master == "", "master", o.master, "nothing beside --manifests")
	}
	o.nftables.validate(&f, modeNFTables)
	o.iptables.validate(&f, modeIPTables)
	o.ipvs.validate(&f)
	o.userspace.validate(&f)
	f.check(o.configSyncPeriod > 0, "config-sync-period", o.configSyncPeriod, "more than 0")
	f.check(o.verbosity >= 0, "v", o.verbosity, "0 or more")
	f.checkAddress("healthz-bind-address", o.healthzAddress)
	f.checkAddress("metrics-bind-address", o.metricsAddress)
	f.check(o.stateDir != "", "state-dir", o.stateDir, "a directory")
	if o.debugAddress != "" {
		debug, err := bindAddress(o.debugAddress, 0)
		f.check(err == nil && debug != "" && !strings.HasSuffix(debug, ":0"), "debug-bind-address", o.debugAddress, "an IP address and a port from 1 to 65535, or nothing")
	}
	if o.traceEndpoint != "" {
		_, err := traceURL(o.traceEndpoint)
		f.check(err == nil, "trace-otlp-endpoint", o.traceEndpoint, "a URL such as http://127.0.0.1:4318, or nothing")
	}
	validateConntrack(&f, &o.conntrack)
	_, err := o.config("")
	return errors.Join(append(f, err)...)
}

func validateConntrack(f *faults, c *conntrack.SysctlOptions) {
	f.check(c.MaxPerCore >= 0, "conntrack-max-per-core", c.MaxPerCore, "0 or more")
	f.check(c.Min >= 0, "conntrack-min", c.Min, "0 or more")
	f.checkTimeout("conntrack-tcp-timeout-established", c.TCPEstablished)
	f.checkTimeout("conntrack-tcp-timeout-close-wait", c.TCPCloseWait)
	f.checkTimeout("conntrack-udp-timeout", c.UDP)
	f.checkTimeout("conntrack-udp-timeout-stream", c.UDPStream)
}

// faults are what is wrong with flags.
type faults []error

func (f *faults) check(ok bool, flag string, value any, want string) {
	if !ok {
		*f = append(*f, fmt.Errorf("--%s=%v: want %s", flag, value, want))
	}
}

func (f *faults) checkAddress(flag, address string) {
	_, err := bindAddress(address, 1)
	f.check(err == nil, flag, address, "an IP address, alone or with a port from 1 to 65535, or nothing")
}

func (f *faults) checkTimeout(flag string, timeout time.Duration) {
	f.check(timeout == 0 || timeout >= time.Second, flag, timeout, "0, or 1s and more: the kernel counts in seconds")
}

// bindAddress appends the port if there is none. Nothing stays nothing.
func bindAddress(text string, port uint16) (string, error) {
	if text == "" {
		return "", nil
	}
	if addr, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil {
		return netip.AddrPortFrom(addr, port).String(), nil
	}
	address, err := netip.ParseAddrPort(text)
	if err != nil {
		return "", err
	}
	if address.Port() == 0 {
		return "", strconv.ErrRange
	}
	return address.String(), nil
}

// nodeName is the node's name, as the API server knows it.
func (o *options) nodeName() (string, error) {
	name := o.hostname
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("look up the host's name: %w", err)
		}
		name = host
	}
	if name = strings.ToLower(strings.TrimSpace(name)); name == "" {
		return "", errors.New("the host has no name: give it one with --hostname-override")
	}
	return name, nil
}
