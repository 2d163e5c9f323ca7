package nodeproxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
)

// options holds the flags. Names and defaults are kube-proxy's, except for the last ones.
type options struct {
	program Options // what has the proxy

	configFile                              string
	ignored                                 []ignored // of the command line and the file
	proxyMode, kubeconfig, master, hostname string
	modeIsSet, oomScoreIsSet                bool
	kubeProxy                               kubeProxyFlags
	set                                     *pflag.FlagSet
	flags                                   map[string]string // all of them, with their values
	origins                                 map[string]string // the fields of the file that have set flags

	clusterCIDR, detectLocalMode, podBridge, podPrefix string
	masqueradeAll                                      bool
	refuseExternalIPs, strictSourceRanges              bool
	deniedExternalIPs                                  []string
	nodePortAddresses                                  []string
	nftables, iptables                                 tuning
	localhostNodePorts                                 bool
	ipvs                                               virtualServers
	userspace                                          sockets
	canary                                             canaryFlags
	health                                             healthFlags
	nftablesOnly                                       nftablesFlags
	ebpf                                               socketFlags
	engines                                            ebpfEngines

	configSyncPeriod               time.Duration
	healthzAddress, metricsAddress string
	debugAddress, traceEndpoint    string
	debugSocket                    debugSocket
	allowedHosts                   []string
	profiling                      bool
	countConnections, countTraffic bool
	conntrack                      conntrack.SysctlOptions
	verbosity                      int
	cleanup                        bool

	manifests, instance, stateDir string
	serviceImports                bool
	clusterID                     string
	leaseNamespace                string
}

func (o *options) register(f *pflag.FlagSet) {
	o.set = f
	f.StringVar(&o.configFile, "config", "", "file with a KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1); other flags override it")
	f.StringVar(&o.proxyMode, "proxy-mode", string(modeNFTables), "engine to use: nftables, iptables, ipvs, ebpf or userspace")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file for the API server; without it and --master, the pod's service account is used")
	f.StringVar(&o.master, "master", "", "address of the API server; overrides the kubeconfig's")
	f.StringVar(&o.hostname, "hostname-override", "", "name of this node; default is the host name")
	f.StringVar(&o.clusterCIDR, "cluster-cidr", "", "pod CIDRs of the cluster, one for each IP family, separated by a comma; for --detect-local-mode=ClusterCIDR")
	f.StringVar(&o.detectLocalMode, "detect-local-mode", byClusterCIDR, "how to detect traffic of this node's pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	f.StringVar(&o.podBridge, "pod-bridge-interface", "", "bridge of the pods, for --detect-local-mode=BridgeInterface")
	f.StringVar(&o.podPrefix, "pod-interface-name-prefix", "", "prefix of the names of the pods' interfaces, for --detect-local-mode=InterfaceNamePrefix")
	f.BoolVar(&o.masqueradeAll, "masquerade-all", false, "masquerade all traffic to cluster IPs")
	f.BoolVar(&o.refuseExternalIPs, "refuse-external-ips", false, "ignore spec.externalIPs of all Services")
	f.StringSliceVar(&o.deniedExternalIPs, "denied-external-ips", nil, "CIDRs in which external IPs are refused, in addition to pod CIDRs, loopback, link-local and multicast; \"node-addresses\" for the addresses of this node")
	f.BoolVar(&o.strictSourceRanges, "strict-source-ranges", false, "drop all traffic to a load balancer IP if no source range of its IP family is valid, instead of allowing all clients")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", nil, "node addresses that accept node ports: CIDRs, primary, localhost and all, which does not include localhost; default is primary in modes nftables and ebpf, and all in other modes")
	o.nftables.register(f, modeNFTables, shortSyncPeriod)
	o.nftablesOnly.register(f)
	o.iptables.register(f, modeIPTables, time.Second)
	f.BoolVar(&o.localhostNodePorts, "iptables-localhost-nodeports", true, "accept node ports on 127.0.0.0/8")
	o.ipvs.register(f)
	o.ebpf.register(f)
	o.userspace.register(f)
	o.canary.register(f)
	o.health.register(f)
	f.DurationVar(&o.configSyncPeriod, "config-sync-period", 15*time.Minute, "accepted as kube-proxy has it; nothing has to be delivered again")
	f.StringVar(&o.healthzAddress, "healthz-bind-address", "0.0.0.0:10256", "address of the health server; empty for none")
	f.StringVar(&o.metricsAddress, "metrics-bind-address", "127.0.0.1:10249", "address of the metrics server; empty for none")
	f.IntVarP(&o.verbosity, "v", "v", 0, "log level; 4 and higher for debugging")
	f.BoolVar(&o.cleanup, "cleanup", false, "remove this instance's rules, restore the kernel settings that it changed, and exit")
	f.BoolVar(&o.profiling, "profiling", false, "serve /debug/pprof/ at --metrics-bind-address")
	f.BoolVar(&o.countConnections, "count-connections", false, "count new connections by service port and endpoint; metrics have at most 1000 service ports of each IP family, and the sum of all others")
	f.BoolVar(&o.countTraffic, "count-traffic", false, "count packets and bytes by service port and endpoint, with metrics as --count-connections; sets net.netfilter.nf_conntrack_acct, except in mode userspace, which counts bytes alone")
	registerConntrack(f, &o.conntrack)
	o.registerSource(f)
	f.StringVar(&o.traceEndpoint, "trace-otlp-endpoint", "", "URL of a collector for traces, by OTLP over HTTP, such as http://127.0.0.1:4318; empty for none")
	f.StringVar(&o.debugAddress, "debug-bind-address", "", "address and port of the debug page, which shows Services and explains packets; use a loopback address, because it has no access control; empty for none")
	o.debugSocket.register(f)
	f.StringSliceVar(&o.allowedHosts, "allowed-hosts", nil, "host names that clients may use for the metrics and debug servers, in addition to IP addresses and localhost; \"*\" for any name")
	o.kubeProxy.register(f)
	f.StringVar(&o.stateDir, "state-dir", "/run/serviceplane", "directory for the previous values of changed kernel settings")
}

// registerSource registers where Services come from, and for which instance.
func (o *options) registerSource(f *pflag.FlagSet) {
	f.StringVar(&o.manifests, "manifests", "", "directory of YAML and JSON files (16 MiB each, 64 MiB together at most) with Services, EndpointSlices and Nodes, instead of an API server")
	f.BoolVar(&o.serviceImports, "service-imports", false, "also watch ServiceImports of the Multi-Cluster Services API (KEP-1645), and program their cluster set IPs like cluster IPs")
	f.StringVar(&o.clusterID, "cluster-id", "", "name of this cluster in its cluster set, for --service-imports: with it, imported endpoints on this node count as local")
	f.StringVar(&o.instance, "instance", "", "name of this instance if several proxies run on the node; each needs its own masquerade bit; default is to use kube-proxy's names")
	f.StringVar(&o.leaseNamespace, "programmed-lease-namespace", "", "write what this node has programmed to a Lease in this namespace, while somebody waits for it; empty for no Lease")
}

func registerConntrack(f *pflag.FlagSet, c *conntrack.SysctlOptions) {
	f.Int32Var(&c.MaxPerCore, "conntrack-max-per-core", 32768, "maximum number of conntrack entries per CPU core; 0 keeps the limit")
	f.Int32Var(&c.Min, "conntrack-min", 131072, "minimum for the limit of conntrack entries, regardless of --conntrack-max-per-core")
	f.BoolVar(&c.LowerMax, "conntrack-lower-max", false, "lower the limit of conntrack entries if it is higher")
	f.DurationVar(&c.TCPEstablished, "conntrack-tcp-timeout-established", 24*time.Hour, "conntrack timeout of idle TCP connections; 0 keeps the value")
	f.DurationVar(&c.TCPCloseWait, "conntrack-tcp-timeout-close-wait", time.Hour, "conntrack timeout of TCP connections in CLOSE_WAIT; 0 keeps the value")
	f.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "treat TCP packets outside of the window as valid")
	f.DurationVar(&c.UDP, "conntrack-udp-timeout", 0, "conntrack timeout of unanswered UDP flows; 0 keeps the value")
	f.DurationVar(&c.UDPStream, "conntrack-udp-timeout-stream", 0, "conntrack timeout of answered UDP flows; 0 keeps the value")
}

// shortSyncPeriod is the minimum time between syncs where a change costs less than a millisecond.
const shortSyncPeriod = 10 * time.Millisecond

// register registers the flags of a mode.
func (t *tuning) register(f *pflag.FlagSet, m mode, minSyncPeriod time.Duration) {
	prefix := string(m)
	f.IntVar(&t.masqueradeBit, prefix+"-masquerade-bit", 14, "bit of the packet mark for masquerading, 0 to 31")
	f.DurationVar(&t.minSyncPeriod, prefix+"-min-sync-period", minSyncPeriod, "minimum time between syncs; 0 for no limit")
	f.DurationVar(&t.syncPeriod, prefix+"-sync-period", 30*time.Second, "maximum time between retries of a failed sync")
}

func (t *tuning) validate(f *faults, m mode) {
	prefix := string(m)
	f.check(t.masqueradeBit >= 0 && t.masqueradeBit <= 31, prefix+"-masquerade-bit", t.masqueradeBit, "0 to 31")
	f.check(t.minSyncPeriod >= 0 && t.minSyncPeriod <= time.Hour, prefix+"-min-sync-period", t.minSyncPeriod, "0 to 1h")
	f.check(t.syncPeriod >= max(t.minSyncPeriod, time.Millisecond), prefix+"-sync-period", t.syncPeriod,
		fmt.Sprintf("at least 1ms and --%s-min-sync-period=%v", prefix, t.minSyncPeriod))
}

// Validate reports all invalid flags, with their values and the allowed ones.
func (o *options) Validate() error {
	var f faults
	f.check(slices.Contains(modes(), o.mode()), "proxy-mode", o.proxyMode, "nftables, iptables, ipvs, ebpf or userspace")
	f.check(o.hostname == "" || strings.TrimSpace(o.hostname) != "", "hostname-override", o.hostname, "a name, or nothing for the host's own")
	if o.manifests != "" {
		f.check(o.kubeconfig == "", "kubeconfig", o.kubeconfig, "nothing beside --manifests")
		f.check(o.master == "", "master", o.master, "nothing beside --manifests")
		f.check(!o.serviceImports, "service-imports", o.serviceImports, "nothing beside --manifests")
		f.check(o.leaseNamespace == "", "programmed-lease-namespace", o.leaseNamespace, "nothing beside --manifests")
	}
	f.check(o.clusterID == "" || o.serviceImports, "cluster-id", o.clusterID, "nothing without --service-imports")
	o.nftables.validate(&f, modeNFTables)
	o.nftablesOnly.validate(&f)
	o.iptables.validate(&f, modeIPTables)
	o.ipvs.validate(&f)
	o.ebpf.validate(&f)
	o.userspace.validate(&f)
	o.canary.validate(&f)
	o.health.validate(&f)
	o.kubeProxy.validate(&f, o.mode())
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

func (f *faults) checkAddress(flag, address string) {
	_, err := bindAddress(address, 1)
	f.check(err == nil, flag, address, "an IP address, alone or with a port from 1 to 65535, or nothing")
}

func (f *faults) checkTimeout(flag string, timeout time.Duration) {
	f.check(timeout == 0 || timeout >= time.Second, flag, timeout, "0, or 1s and more: the kernel counts in seconds")
}

// bindAddress appends the port if there is none. An empty text stays empty.
func bindAddress(text string, port uint16) (string, error) {
	if text == "" {
		return "", nil
	}
	if addr, ok := changetracker.ParseAddr(strings.Trim(text, "[]")); ok {
		return netip.AddrPortFrom(addr, port).String(), nil
	}
	host, digits, err := net.SplitHostPort(text)
	if err != nil {
		return "", err
	}
	addr, ok := changetracker.ParseAddr(host)
	number, err := strconv.ParseUint(digits, 10, 16)
	if !ok || err != nil || number == 0 {
		return "", strconv.ErrRange
	}
	return netip.AddrPortFrom(addr, uint16(number)).String(), nil
}

// nodeName returns the name of the Node object.
func (o *options) nodeName() (string, error) {
	name := o.hostname
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return "", fmt.Errorf("read host name: %w", err)
		}
		name = host
	}
	if name = strings.ToLower(strings.TrimSpace(name)); name == "" {
		return "", errors.New("host name is empty: set --hostname-override")
	}
	return name, nil
}
