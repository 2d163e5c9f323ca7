package nodeproxy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// configz responds with the flags as a KubeProxyConfiguration of
// kubeproxy.config.k8s.io/v1alpha1.
func (o *options) configz(w http.ResponseWriter, _ *http.Request) {
	var config map[string]any
	_ = o.kubeProxyConfiguration().Decode(&config) // it was made of such values
	w.Header().Set("Content-Type", typeJSON)
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_ = json.NewEncoder(w).Encode(map[string]any{configGroup: config}) // the client may be gone
}

// writeConfig writes the configuration that the flags and the file make, for --config.
func (o *options) writeConfig() error {
	text, err := yaml.Marshal(o.kubeProxyConfiguration())
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	if err := os.WriteFile(o.kubeProxy.writeConfigTo, text, 0o644); err != nil { //nolint:gosec // it has no secrets, and kube-proxy's file is readable too
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

// kubeProxyConfiguration returns the configuration in YAML.
func (o *options) kubeProxyConfiguration() *yaml.Node {
	values := o.notOfFlags()
	document := &yaml.Node{Kind: yaml.MappingNode}
	sections := map[string]*yaml.Node{}
	for _, row := range configFields() {
		field, flag, _ := strings.Cut(row, "=")
		if field == "featureGates" && len(o.kubeProxy.gates) == 0 {
			continue
		}
		value, ok := values[field]
		if !ok {
			value = valueOf(o.set, flag)
		}
		section, name, inside := strings.Cut(field, ".")
		if !inside {
			document.Content = append(document.Content, nodeOf(field), nodeOf(value))
			continue
		}
		if sections[section] == nil {
			sections[section] = &yaml.Node{Kind: yaml.MappingNode}
			document.Content = append(document.Content, nodeOf(section), sections[section])
		}
		sections[section].Content = append(sections[section].Content, nodeOf(name), nodeOf(value))
	}
	return document
}

// notOfFlags returns the fields that do not have the value of a flag alone. Those without effect have kube-proxy's
// defaults.
func (o *options) notOfFlags() map[string]any {
	healthz, _ := bindAddress(o.healthzAddress, healthzPort)
	metrics, _ := bindAddress(o.metricsAddress, metricsPort)
	return map[string]any{
		"apiVersion": configVersion, "kind": configKind, "mode": string(o.mode()), "featureGates": map[string]bool(o.kubeProxy.gates),
		"healthzBindAddress": healthz, "metricsBindAddress": metrics,
		"nftables.masqueradeAll": o.masqueradeAll && o.section() == string(modeNFTables),
		"iptables.masqueradeAll": o.masqueradeAll && o.section() == string(modeIPTables),

		"clientConnection.acceptContentTypes": "", "logging.flushFrequency": "5s", "showHiddenMetricsForVersion": "",
		"winkernel.networkName": "", "winkernel.sourceVip": "", "winkernel.enableDSR": false,
		"winkernel.rootHnsEndpointName": "", "winkernel.forwardHealthCheckVip": false,
	}
}

// valueOf returns the value of a flag as a field has it.
func valueOf(set *pflag.FlagSet, flag string) (value any) {
	f := set.Lookup(flag)
	switch text := f.Value.String(); f.Value.Type() {
	case "stringSlice":
		value, _ = set.GetStringSlice(flag) // it has this type
	case "string", "duration":
		value = text
	default:
		_ = yaml.Unmarshal([]byte(text), &value) // true, false and numbers
	}
	return value
}

// nodeOf returns a value in YAML.
func nodeOf(value any) *yaml.Node {
	var node yaml.Node
	_ = node.Encode(value) // texts, numbers, and lists and maps of them
	return &node
}
