package nodeproxy

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

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
