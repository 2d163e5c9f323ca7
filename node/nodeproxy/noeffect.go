package nodeproxy

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
)

// noEffect is a flag of kube-proxy, a field of its configuration, or both, that changes
// nothing here. A value other than kube-proxy's default is logged.
type noEffect struct {
	flag, field string
	isSwitch    bool     // the flag may stand without a value
	defaults    []string // values of kube-proxy's default, beside "", 0 and false
	why         string
}

const (
	whyWindows   = "it is for Windows"
	whyStderr    = "all lines go to stderr at once"
	whyLogFormat = "the log goes to stderr, see --logging-format and --v"
	whyRemoved   = "newer versions of kube-proxy do not have it either"
)

// withoutEffect lists all of them: of kube-proxy 1.37, and of older versions, because
// command lines outlive them.
func withoutEffect() []noEffect {
	return []noEffect{
		{flag: "log-flush-frequency", field: "logging.flushFrequency", defaults: []string{"5s", "5000000000"}, why: whyStderr},
		{flag: "log-text-split-stream", isSwitch: true, why: whyStderr},
		{flag: "log-text-info-buffer-size", why: whyStderr},
		{flag: "log-json-split-stream", isSwitch: true, why: whyStderr},
		{flag: "log-json-info-buffer-size", why: whyStderr},
		{field: "logging.options", why: whyStderr},
		{flag: "vmodule", field: "logging.vmodule", why: "all files have the level of --v"},
		{flag: "show-hidden-metrics-for-version", field: "showHiddenMetricsForVersion", why: "no metric is hidden"},
		{field: "clientConnection.acceptContentTypes", why: "the client accepts the type of --kube-api-content-type, and JSON"},
		{field: "iptables.snatNodeInternalIP", why: "traffic is masqueraded as the address of the outgoing interface"},

		{flag: "windows-service", field: "windowsRunAsService", isSwitch: true, why: whyWindows},
		{flag: "network-name", why: whyWindows},
		{flag: "source-vip", why: whyWindows},
		{flag: "enable-dsr", isSwitch: true, why: whyWindows},
		{flag: "root-hnsendpoint-name", why: whyWindows},
		{flag: "forward-healthcheck-vip", isSwitch: true, why: whyWindows},
		{field: "winkernel", why: whyWindows},

		{flag: "add-dir-header", isSwitch: true, why: whyLogFormat},
		{flag: "alsologtostderr", isSwitch: true, why: whyLogFormat},
		{flag: "log-backtrace-at", defaults: []string{":0"}, why: whyLogFormat},
		{flag: "log-dir", why: whyLogFormat},
		{flag: "log-file", why: whyLogFormat},
		{flag: "log-file-max-size", defaults: []string{"1800"}, why: whyLogFormat},
		{flag: "logtostderr", isSwitch: true, defaults: []string{"true"}, why: whyLogFormat},
		{flag: "one-output", isSwitch: true, why: whyLogFormat},
		{flag: "skip-headers", isSwitch: true, why: whyLogFormat},
		{flag: "skip-log-headers", isSwitch: true, why: whyLogFormat},
		{flag: "stderrthreshold", defaults: []string{"2", "ERROR"}, why: whyLogFormat},

		{flag: "azure-container-registry-config", why: whyRemoved},
		{flag: "boot-id-file", defaults: []string{"/proc/sys/kernel/random/boot_id"}, why: whyRemoved},
		{flag: "cleanup-ipvs", isSwitch: true, defaults: []string{"true"}, why: "rules of other modes are removed after the first sync"},
		{flag: "conntrack-max", field: "conntrack.max", why: "set --conntrack-max-per-core and --conntrack-min"},
		{flag: "google-json-key", why: whyRemoved},
		{flag: "machine-id-file", defaults: []string{"/etc/machine-id,/var/lib/dbus/machine-id"}, why: whyRemoved},
		{flag: "resource-container", field: "resourceContainer", defaults: []string{"/kube-proxy"}, why: whyRemoved},
	}
}

// registerWithoutEffect registers the flags without effect. --help does not list them.
func registerWithoutEffect(f *pflag.FlagSet) {
	for _, n := range withoutEffect() {
		if n.flag == "" {
			continue
		}
		f.String(n.flag, "", n.why)
		f.Lookup(n.flag).Hidden = true
		if n.isSwitch {
			f.Lookup(n.flag).NoOptDefVal = "true"
		}
	}
}

// ignored is a flag, a field or a feature gate that is set without effect.
type ignored struct{ what, why string }

// ignoredFlags returns the flags of the command line without effect.
func ignoredFlags(f *pflag.FlagSet) (all []ignored) {
	for _, n := range withoutEffect() {
		if flag := f.Lookup(n.flag); flag != nil && flag.Changed && !n.isDefault(flag.Value.String()) {
			all = append(all, ignored{"--" + n.flag, n.why})
		}
	}
	return all
}

// fieldWithoutEffect returns the row of a field, or of a section that it is in.
func fieldWithoutEffect(field string) (row noEffect, ok bool) {
	rows := withoutEffect()
	i := slices.IndexFunc(rows, func(n noEffect) bool {
		return n.field != "" && (field == n.field || strings.HasPrefix(field, n.field+"."))
	})
	if i < 0 {
		return noEffect{}, false
	}
	return rows[i], true
}

func (n *noEffect) isDefault(text string) bool {
	return isZero(text) || slices.Contains(n.defaults, text)
}

// warn logs everything that is set without effect, a line each.
func (o *options) warn(log *zap.Logger) {
	for _, i := range o.ignored {
		log.Warn("setting has no effect: remove it, or see why", zap.String("setting", i.what), zap.String("why", i.why))
	}
}

// gates are the feature gates that are set, by name. It implements pflag.Value.
type gates map[string]bool

// Feature gates of kube-proxy that switch something here.
const (
	gateExternalIPs = "AllowServiceExternalIPs" // KEP-5707
	gateIPVS        = "KubeProxyIPVS"           // KEP-5495
	gateFlagz       = "ComponentFlagz"          // KEP-4828
	gateStatusz     = "ComponentStatusz"        // KEP-4827

	allAlpha, allBeta = "AllAlpha", "AllBeta" // the default of all gates of a stage
)

// alwaysOn returns gates of kube-proxy, up to 1.37, whose features nodeproxy always has.
func alwaysOn() []string {
	return []string{
		"ContextualLogging", "EndpointSliceProxying", "EndpointSliceTerminatingCondition", "IPv6DualStack", "KubeProxyDrainingTerminatingNodes",
		"KubeProxyNFTablesLocalhostNodePorts", "LoadBalancerIPMode", "MinimizeIPTablesRestore", "MixedProtocolLBService", "NFTablesNetlink", "NFTablesProxyMode",
		"PreferSameTrafficDistribution", "ProxyTerminatingEndpoints", "RelaxedServiceNameValidation", "SCTPSupport", "ServiceInternalTrafficPolicy",
		"ServiceTrafficDistribution", "TopologyAwareHints", "WatchListClient",
	}
}

// enabled reports whether a gate with an effect is on, which is the default of all.
func (g *gates) enabled(name string) bool {
	if on, ok := (*g)[name]; ok {
		return on
	}
	if on, ok := (*g)[allBeta]; ok && (name == gateFlagz || name == gateStatusz) {
		return on
	}
	return true
}

// ignored returns the gates without effect.
func (g *gates) ignored() (all []ignored) {
	for _, name := range slices.Sorted(maps.Keys(*g)) {
		why := "nodeproxy does not know this feature"
		switch {
		case slices.Contains([]string{gateExternalIPs, gateIPVS, gateFlagz, gateStatusz, allBeta}, name), name == allAlpha && !(*g)[name]:
			continue
		case name == allAlpha:
			why = "no feature of nodeproxy is alpha"
		case slices.Contains(alwaysOn(), name) && (*g)[name]:
			continue
		case slices.Contains(alwaysOn(), name):
			why = "this feature is always on"
		}
		all = append(all, ignored{fmt.Sprintf("feature gate %s=%t", name, (*g)[name]), why})
	}
	return all
}

// String implements pflag.Value.
func (g *gates) String() string {
	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(*g)) {
		pairs = append(pairs, fmt.Sprintf("%s=%t", name, (*g)[name]))
	}
	return strings.Join(pairs, ",")
}

// Set implements pflag.Value. It adds gates such as "A=true,B=false", and changes none if
// one is malformed.
func (g *gates) Set(text string) error {
	parsed := gates{}
	for pair := range strings.SplitSeq(text, ",") {
		if pair = strings.TrimSpace(pair); pair == "" {
			continue
		}
		name, value, _ := strings.Cut(pair, "=")
		on, err := strconv.ParseBool(strings.TrimSpace(value))
		if name = strings.TrimSpace(name); err != nil || name == "" {
			return fmt.Errorf("parse feature gate %q: want NAME=true or NAME=false", pair)
		}
		parsed[name] = on
	}
	if *g == nil {
		*g = gates{}
	}
	maps.Copy(*g, parsed)
	return nil
}

// Type implements pflag.Value.
func (g *gates) Type() string { return gatesType }

const gatesType = "NAME=BOOL"
