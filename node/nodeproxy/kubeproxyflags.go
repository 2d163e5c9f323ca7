package nodeproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
)

// kubeProxyFlags are flags that command lines of kube-proxy have, and that nodeproxy would
// not need. Those without effect are in noeffect.go.
type kubeProxyFlags struct {
	gates gates

	apiQPS         float32
	apiBurst       int
	apiContentType string

	bindAddress              string
	hardFail                 bool
	healthzPort, metricsPort int

	oomScoreAdj   int
	logFormat     string
	writeConfigTo string
	initOnly      bool
}

// logJSON is the value of --logging-format for one JSON object a line.
const logJSON = "json"

func (k *kubeProxyFlags) register(f *pflag.FlagSet) {
	f.Var(&k.gates, "feature-gates", "feature gates, separated by commas: "+strings.Join([]string{gateExternalIPs, gateFlagz, gateStatusz, gateIPVS}, ", ")+"; others have no effect")
	f.Float32Var(&k.apiQPS, "kube-api-qps", 5, "maximum average number of requests per second to the API server; negative for no limit")
	f.IntVar(&k.apiBurst, "kube-api-burst", 10, "maximum number of requests at once to the API server")
	f.StringVar(&k.apiContentType, "kube-api-content-type", runtime.ContentTypeProtobuf, "content type of requests to the API server: "+runtime.ContentTypeProtobuf+" or "+runtime.ContentTypeJSON)
	f.StringVar(&k.bindAddress, "bind-address", "0.0.0.0", "an IPv6 address changes the defaults of --healthz-bind-address and --metrics-bind-address to [::] and [::1]; no socket listens at it")
	f.BoolVar(&k.hardFail, "bind-address-hard-fail", false, "end if a server cannot listen, instead of trying again")
	f.IntVar(&k.healthzPort, "healthz-port", healthzPort, "port of the health server if --healthz-bind-address has none; 0 for no server")
	f.IntVar(&k.metricsPort, "metrics-port", metricsPort, "port of the metrics server if --metrics-bind-address has none; 0 for no server")
	f.IntVar(&k.oomScoreAdj, "oom-score-adj", -999, "OOM score adjustment of the process, -1000 to 1000; without CAP_SYS_RESOURCE it cannot be lowered")
	f.StringVar(&k.logFormat, "logging-format", "text", "format of the log: text or json")
	f.StringVar(&k.writeConfigTo, "write-config-to", "", "write the configuration as a KubeProxyConfiguration to this file, and exit")
	f.BoolVar(&k.initOnly, "init-only", false, "change the kernel settings of connection tracking, which needs full privileges, and exit")
	registerWithoutEffect(f)
}

// wordSeparators makes underscores in flags hyphens, as Kubernetes' components do.
func wordSeparators(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
}

func (k *kubeProxyFlags) validate(f *faults, m mode) {
	f.check(m != modeIPVS || k.gates.enabled(gateIPVS), "feature-gates", k.gates.String(), "no "+gateIPVS+"=false with mode ipvs, or another --proxy-mode")
	f.check(k.apiBurst >= 0, "kube-api-burst", k.apiBurst, "0 or more")
	types := []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON}
	f.check(slices.Contains(types, k.apiContentType), "kube-api-content-type", k.apiContentType, strings.Join(types, " or "))
	_, ok := changetracker.ParseAddr(k.bindAddress)
	f.check(ok, "bind-address", k.bindAddress, "an IP address")
	f.check(isPort(k.healthzPort), "healthz-port", k.healthzPort, "a port, or 0 for no server")
	f.check(isPort(k.metricsPort), "metrics-port", k.metricsPort, "a port, or 0 for no server")
	f.check(k.oomScoreAdj >= -1000 && k.oomScoreAdj <= 1000, "oom-score-adj", k.oomScoreAdj, "-1000 to 1000")
	f.check(k.logFormat == "text" || k.logFormat == logJSON, "logging-format", k.logFormat, "text or json")
}

func isPort(port int) bool { return port >= 0 && port <= 1<<16-1 }

// complete changes the flags that depend on others, after the command line and the file
// were read.
func (o *options) complete(f *pflag.FlagSet) {
	o.modeIsSet = f.Changed("proxy-mode") && o.proxyMode != ""
	o.oomScoreIsSet = f.Changed("oom-score-adj")
	o.healthzAddress = deprecatedPort(f, "healthz", o.healthzAddress, o.kubeProxy.healthzPort)
	o.metricsAddress = deprecatedPort(f, "metrics", o.metricsAddress, o.kubeProxy.metricsPort)
	addr, ok := changetracker.ParseAddr(o.kubeProxy.bindAddress)
	if ok && addr.Is6() {
		if !f.Changed("healthz-bind-address") && o.healthzAddress != "" {
			o.healthzAddress = "[::]:" + strconv.Itoa(healthzPort)
		}
		if !f.Changed("metrics-bind-address") && o.metricsAddress != "" {
			o.metricsAddress = "[::1]:" + strconv.Itoa(metricsPort)
		}
	}
	if ok && !addr.IsUnspecified() {
		o.ignored = append(o.ignored, ignored{"--bind-address", "the addresses of the node are those of its Node object"})
	}
	o.ignored = append(o.ignored, ignoredFlags(f)...)
	o.ignored = append(o.ignored, o.kubeProxy.gates.ignored()...)
}

// deprecatedPort applies --healthz-port or --metrics-port to an address: 0 means no
// server, and others count only for an address without a port (OPT-32).
func deprecatedPort(f *pflag.FlagSet, server, address string, port int) string {
	if !f.Changed(server + "-port") {
		return address
	}
	if port == 0 {
		return ""
	}
	if addr, ok := changetracker.ParseAddr(strings.Trim(address, "[]")); ok && isPort(port) {
		return netip.AddrPortFrom(addr, uint16(port)).String()
	}
	return address
}

// tuneClient applies the limits and the content type to a client.
func (k *kubeProxyFlags) tuneClient(config *rest.Config) {
	config.QPS, config.Burst = k.apiQPS, k.apiBurst
	// Protobuf costs several times less than JSON. Servers without it answer in JSON.
	config.ContentType = k.apiContentType
	config.AcceptContentTypes = k.apiContentType
	if k.apiContentType != runtime.ContentTypeJSON {
		config.AcceptContentTypes += "," + runtime.ContentTypeJSON
	}
}

const oomScoreFile = "/proc/self/oom_score_adj"

// adjustOOMScore makes the kernel spare this process when memory runs out (SYS-13).
// A failure matters only to who has set the flag.
func (o *options) adjustOOMScore(log *zap.Logger) {
	err := os.WriteFile(oomScoreFile, []byte(strconv.Itoa(o.kubeProxy.oomScoreAdj)), 0o600)
	switch {
	case err == nil:
	case o.oomScoreIsSet && !errors.Is(err, os.ErrNotExist):
		log.Warn("--oom-score-adj has no effect: the kernel refused the score", zap.Error(err))
	default:
		log.Debug("OOM score of the process is not changed", zap.Error(err))
	}
}

// logMode logs why the mode is what it is if nobody has set it.
func (o *options) logMode(log *zap.Logger) {
	if o.modeIsSet {
		return
	}
	why := fmt.Sprintf("no mode is set, and %s is nodeproxy's default; kube-proxy's is iptables before 1.40", o.mode())
	if len(o.nodePortAddresses) == 0 {
		why += "; node ports are accepted at the node's primary addresses only, see --nodeport-addresses"
	}
	log.Info("mode is chosen", zap.String("mode", string(o.mode())), zap.String("why", why))
}
