package main

import (
	"encoding/json"
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// configzKey is the key of the configuration in kube-proxy's /configz.
const configzKey = "kubeproxy.config.k8s.io"

// configz responds with the flags as a KubeProxyConfiguration of
// kubeproxy.config.k8s.io/v1alpha1. It has the fields that have flags.
func (o *options) configz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_ = json.NewEncoder(w).Encode(map[string]kubeProxyConfiguration{configzKey: o.kubeProxyConfiguration()}) // the client may be gone
}

type kubeProxyConfiguration struct {
	APIVersion         string           `json:"apiVersion"`
	Kind               string           `json:"kind"`
	Mode               string           `json:"mode"`
	HostnameOverride   string           `json:"hostnameOverride"`
	ClientConnection   clientConnection `json:"clientConnection"`
	ClusterCIDR        string           `json:"clusterCIDR"`
	DetectLocalMode    string           `json:"detectLocalMode"`
	DetectLocal        detectLocal      `json:"detectLocal"`
	NodePortAddresses  []string         `json:"nodePortAddresses"`
	PortRange          string           `json:"portRange"`
	ConfigSyncPeriod   metav1.Duration  `json:"configSyncPeriod"`
	HealthzBindAddress string           `json:"healthzBindAddress"`
	MetricsBindAddress string           `json:"metricsBindAddress"`
	EnableProfiling    bool             `json:"enableProfiling"`
	Nftables           modeConfig       `json:"nftables"`
	Iptables           iptablesConfig   `json:"iptables"`
	Conntrack          conntrackConfig  `json:"conntrack"`
}

type clientConnection struct {
	Kubeconfig string `json:"kubeconfig"`
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

func (t *tuning) shown(masqueradeAll bool) modeConfig {
	return modeConfig{t.masqueradeBit, masqueradeAll, metav1.Duration{Duration: t.syncPeriod}, metav1.Duration{Duration: t.minSyncPeriod}}
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

func (o *options) kubeProxyConfiguration() kubeProxyConfiguration {
	healthz, _ := bindAddress(o.healthzAddress, healthzPort)
	metrics, _ := bindAddress(o.metricsAddress, metricsPort)
	return kubeProxyConfiguration{
		APIVersion: configzKey + "/v1alpha1", Kind: "KubeProxyConfiguration", Mode: string(o.mode()),
		HostnameOverride: o.hostname, ClientConnection: clientConnection{o.kubeconfig},
		ClusterCIDR: o.clusterCIDR, DetectLocalMode: o.detectLocalMode, DetectLocal: detectLocal{o.podBridge, o.podPrefix},
		PortRange: o.userspace.ports, NodePortAddresses: append([]string{}, o.nodePortAddresses...), ConfigSyncPeriod: metav1.Duration{Duration: o.configSyncPeriod},
		HealthzBindAddress: healthz, MetricsBindAddress: metrics, EnableProfiling: o.profiling,
		Nftables: o.nftables.shown(o.masqueradeAll),
		Iptables: iptablesConfig{o.iptables.shown(o.masqueradeAll), o.localhostNodePorts},
		Conntrack: conntrackConfig{
			o.conntrack.MaxPerCore, o.conntrack.Min,
			metav1.Duration{Duration: o.conntrack.TCPEstablished},
			metav1.Duration{Duration: o.conntrack.TCPCloseWait},
			o.conntrack.TCPBeLiberal,
			metav1.Duration{Duration: o.conntrack.UDP},
			metav1.Duration{Duration: o.conntrack.UDPStream},
		},
	}
}
