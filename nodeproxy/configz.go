package nodeproxy

import (
	"encoding/json"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// configzKey is the key of the configuration in kube-proxy's /configz.
const configzKey = "kubeproxy.config.k8s.io"

// configz responds with the flags as a KubeProxyConfiguration of
// kubeproxy.config.k8s.io/v1alpha1.
func (o *options) configz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_ = json.NewEncoder(w).Encode(map[string]*kubeProxyConfiguration{configzKey: o.kubeProxyConfiguration()}) // the client may be gone
}

// kubeProxyConfiguration has all fields of KubeProxyConfiguration of v1alpha1 in 1.37, as
// an older kube-proxy refuses to start with fields that it does not know.
type kubeProxyConfiguration struct {
	APIVersion          string           `json:"apiVersion"`
	Kind                string           `json:"kind"`
	Mode                string           `json:"mode"`
	FeatureGates        gates            `json:"featureGates,omitempty"`
	HostnameOverride    string           `json:"hostnameOverride"`
	ClientConnection    clientConnection `json:"clientConnection"`
	Logging             logging          `json:"logging"`
	ClusterCIDR         string           `json:"clusterCIDR"`
	DetectLocalMode     string           `json:"detectLocalMode"`
	DetectLocal         detectLocal      `json:"detectLocal"`
	NodePortAddresses   []string         `json:"nodePortAddresses"`
	PortRange           string           `json:"portRange"`
	ConfigSyncPeriod    metav1.Duration  `json:"configSyncPeriod"`
	BindAddress         string           `json:"bindAddress"`
	BindAddressHardFail bool             `json:"bindAddressHardFail"`
	HealthzBindAddress  string           `json:"healthzBindAddress"`
	MetricsBindAddress  string           `json:"metricsBindAddress"`
	EnableProfiling     bool             `json:"enableProfiling"`
	ShowHiddenMetrics   string           `json:"showHiddenMetricsForVersion"`
	OOMScoreAdj         int              `json:"oomScoreAdj"`
	Nftables            modeConfig       `json:"nftables"`
	Iptables            iptablesConfig   `json:"iptables"`
	IPVS                ipvsConfig       `json:"ipvs"`
	Winkernel           winkernel        `json:"winkernel"`
	Conntrack           conntrackConfig  `json:"conntrack"`
}

func (c *kubeProxyConfiguration) json() ([]byte, error) { return json.Marshal(c) }

type clientConnection struct {
	Kubeconfig         string  `json:"kubeconfig"`
	AcceptContentTypes string  `json:"acceptContentTypes"`
	ContentType        string  `json:"contentType"`
	QPS                float32 `json:"qps"`
	Burst              int     `json:"burst"`
}

type logging struct {
	Format         string          `json:"format"`
	FlushFrequency metav1.Duration `json:"flushFrequency"`
	Verbosity      int             `json:"verbosity"`
}

type detectLocal struct {
	BridgeInterface     string `json:"bridgeInterface"`
	InterfaceNamePrefix string `json:"interfaceNamePrefix"`
}

type modeConfig struct {
	MasqueradeBit int             `json:"masqueradeBit"`
	MasqueradeAll bool            `json:"masqueradeAll"`
	SyncPeriod    metav1.Duration `json:"syncPeriod"`
	MinSyncPeriod metav1.Duration `json:"minSyncPeriod"`
}

type iptablesConfig struct {
	modeConfig

	LocalhostNodePorts bool `json:"localhostNodePorts"`
}

type ipvsConfig struct {
	SyncPeriod    metav1.Duration `json:"syncPeriod"`
	MinSyncPeriod metav1.Duration `json:"minSyncPeriod"`
	Scheduler     string          `json:"scheduler"`
	ExcludeCIDRs  []string        `json:"excludeCIDRs"`
	StrictARP     bool            `json:"strictARP"`
	TCPTimeout    metav1.Duration `json:"tcpTimeout"`
	TCPFinTimeout metav1.Duration `json:"tcpFinTimeout"`
	UDPTimeout    metav1.Duration `json:"udpTimeout"`
}

type winkernel struct {
	NetworkName           string `json:"networkName"`
	SourceVip             string `json:"sourceVip"`
	EnableDSR             bool   `json:"enableDSR"`
	RootHnsEndpointName   string `json:"rootHnsEndpointName"`
	ForwardHealthCheckVip bool   `json:"forwardHealthCheckVip"`
}

type conntrackConfig struct {
	MaxPerCore            int32           `json:"maxPerCore"`
	Min                   int32           `json:"min"`
	TCPEstablishedTimeout metav1.Duration `json:"tcpEstablishedTimeout"`
	TCPCloseWaitTimeout   metav1.Duration `json:"tcpCloseWaitTimeout"`
	TCPBeLiberal          bool            `json:"tcpBeLiberal"`
	UDPTimeout            metav1.Duration `json:"udpTimeout"`
	UDPStreamTimeout      metav1.Duration `json:"udpStreamTimeout"`
}

func inConfig(d time.Duration) metav1.Duration { return metav1.Duration{Duration: d} }

func (t *tuning) shown(masqueradeAll bool) modeConfig {
	return modeConfig{t.masqueradeBit, masqueradeAll, inConfig(t.syncPeriod), inConfig(t.minSyncPeriod)}
}

func (v *virtualServers) shown() ipvsConfig {
	return ipvsConfig{
		inConfig(v.syncPeriod), inConfig(v.minSyncPeriod), v.scheduler, append([]string{}, v.exclude...), v.strictARP,
		inConfig(v.tcpTimeout), inConfig(v.tcpFinTimeout), inConfig(v.udpTimeout),
	}
}

func (o *options) kubeProxyConfiguration() *kubeProxyConfiguration {
	healthz, _ := bindAddress(o.healthzAddress, healthzPort)
	metrics, _ := bindAddress(o.metricsAddress, metricsPort)
	k := &o.kubeProxy
	return &kubeProxyConfiguration{
		APIVersion: configzKey + "/v1alpha1", Kind: "KubeProxyConfiguration", Mode: string(o.mode()), FeatureGates: k.gates,
		HostnameOverride: o.hostname, ClientConnection: clientConnection{Kubeconfig: o.kubeconfig, ContentType: k.apiContentType, QPS: k.apiQPS, Burst: k.apiBurst},
		Logging:     logging{k.logFormat, inConfig(logFlushFrequency), o.verbosity},
		ClusterCIDR: o.clusterCIDR, DetectLocalMode: o.detectLocalMode, DetectLocal: detectLocal{o.podBridge, o.podPrefix},
		PortRange: o.userspace.ports, NodePortAddresses: append([]string{}, o.nodePortAddresses...), ConfigSyncPeriod: inConfig(o.configSyncPeriod),
		BindAddress: k.bindAddress, BindAddressHardFail: k.hardFail, HealthzBindAddress: healthz, MetricsBindAddress: metrics,
		EnableProfiling: o.profiling, OOMScoreAdj: k.oomScoreAdj,
		Nftables: o.nftables.shown(o.masqueradeAll && o.section() == string(modeNFTables)),
		Iptables: iptablesConfig{o.iptables.shown(o.masqueradeAll && o.section() == string(modeIPTables)), o.localhostNodePorts},
		IPVS:     o.ipvs.shown(),
		Conntrack: conntrackConfig{
			o.conntrack.MaxPerCore, o.conntrack.Min,
			inConfig(o.conntrack.TCPEstablished), inConfig(o.conntrack.TCPCloseWait), o.conntrack.TCPBeLiberal,
			inConfig(o.conntrack.UDP), inConfig(o.conntrack.UDPStream),
		},
	}
}

// logFlushFrequency is kube-proxy's default, without effect here.
const logFlushFrequency = 5 * time.Second
