package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// The kind of file that --config reads, as kube-proxy does.
const (
	configVersion = "kubeproxy.config.k8s.io/v1alpha1"
	configKind    = "KubeProxyConfiguration"
)

// flagsOfFields returns the flags of the file's fields.
func flagsOfFields() map[string]string {
	fields := map[string]string{
		"mode": "proxy-mode", "hostnameOverride": "hostname-override", "clientConnection.kubeconfig": "kubeconfig",
		"clusterCIDR": "cluster-cidr", "detectLocalMode": "detect-local-mode",
		"detectLocal.bridgeInterface": "pod-bridge-interface", "detectLocal.interfaceNamePrefix": "pod-interface-name-prefix",
		"nodePortAddresses": "nodeport-addresses", "portRange": "proxy-port-range", "configSyncPeriod": "config-sync-period",
		"healthzBindAddress": "healthz-bind-address", "metricsBindAddress": "metrics-bind-address", "enableProfiling": "profiling",
		"bindAddress": "bind-address", "bindAddressHardFail": "bind-address-hard-fail", "oomScoreAdj": "oom-score-adj", "featureGates": "feature-gates",
		"clientConnection.qps": "kube-api-qps", "clientConnection.burst": "kube-api-burst", "clientConnection.contentType": "kube-api-content-type",
		"logging.format": "logging-format", "logging.verbosity": "v",
		"udpIdleTimeout":         "udp-timeout", // of v1alpha1 until 1.25
		"nftables.masqueradeAll": "masquerade-all", "iptables.masqueradeAll": "masquerade-all",
		"iptables.localhostNodePorts": "iptables-localhost-nodeports",
		"ipvs.scheduler":              "ipvs-scheduler", "ipvs.excludeCIDRs": "ipvs-exclude-cidrs", "ipvs.strictARP": "ipvs-strict-arp",
		"ipvs.tcpTimeout": "ipvs-tcp-timeout", "ipvs.tcpFinTimeout": "ipvs-tcpfin-timeout", "ipvs.udpTimeout": "ipvs-udp-timeout",
		"conntrack.maxPerCore": "conntrack-max-per-core", "conntrack.min": "conntrack-min", "conntrack.tcpBeLiberal": "conntrack-tcp-be-liberal",
		"conntrack.tcpEstablishedTimeout": "conntrack-tcp-timeout-established", "conntrack.tcpCloseWaitTimeout": "conntrack-tcp-timeout-close-wait",
		"conntrack.udpTimeout": "conntrack-udp-timeout", "conntrack.udpStreamTimeout": "conntrack-udp-timeout-stream",
	}
	for _, m := range []mode{modeNFTables, modeIPTables, modeIPVS} {
		for field, flag := range map[string]string{"masqueradeBit": "masquerade-bit", "syncPeriod": "sync-period", "minSyncPeriod": "min-sync-period"} {
			fields[string(m)+"."+field] = string(m) + "-" + flag
		}
	}
	delete(fields, "ipvs.masqueradeBit")
	return fields
}

// configFile sets flags from a KubeProxyConfiguration. Flags of the command line override
// it.
type configFile struct {
	path      string
	flags     *pflag.FlagSet
	fields    map[string]string
	bySection []setting // fields of several sections that have one flag
	ignored   []ignored
	errs      []error
}

// setting is a field with its flag and its value.
type setting struct {
	field, flag string
	value       *yaml.Node
}

// readConfigFile sets the flags of a file's fields. It returns the fields without effect
// that are set.
func (o *options) readConfigFile(flags *pflag.FlagSet) ([]ignored, error) {
	path := o.configFile
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	document, err := parseYAML(path, text)
	if err != nil {
		return nil, err
	}
	c := &configFile{path: path, flags: flags, fields: flagsOfFields()}
	if len(document.Content) != 1 || document.Content[0].Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s: want a %s of %s", path, configKind, configVersion)
	}
	c.walk("", document.Content[0])
	c.choose(o.section(), o.mode())
	return c.ignored, errors.Join(c.errs...)
}

// parseYAML parses the only document of a file. A key that is there twice is an error, as nobody
// knows which one was meant.
func parseYAML(path string, text []byte) (document yaml.Node, err error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	if err = decoder.Decode(&document); errors.Is(err, io.EOF) {
		return document, nil
	}
	if err == nil {
		var all any
		err = document.Decode(&all) // refuses what a Node has: duplicates, and aliases that have no end
	}
	if err != nil {
		return document, atLine(path, err)
	}
	var second yaml.Node
	switch err = decoder.Decode(&second); {
	case errors.Is(err, io.EOF):
		return document, nil
	case err != nil:
		return document, atLine(path, err)
	case isNull(second.Content[0]): // after a last line of hyphens
		return document, nil
	}
	return document, fmt.Errorf("%s:%d: a second document begins: want one", path, second.Line)
}

// atLine returns an error of the YAML package as "path:line: what".
func atLine(path string, err error) error {
	texts := []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	if several := (*yaml.TypeError)(nil); errors.As(err, &several) {
		texts = several.Errors
	}
	var errs []error
	for _, text := range texts {
		line := ""
		if at, what, ok := strings.Cut(text, ": "); ok && strings.HasPrefix(at, "line ") {
			line, text = strings.TrimPrefix(at, "line ")+":", what
		}
		errs = append(errs, fmt.Errorf("%s:%s %s", path, line, text))
	}
	return errors.Join(errs...)
}

func (c *configFile) fail(at *yaml.Node, format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf("%s:%d: %s", c.path, at.Line, fmt.Sprintf(format, args...)))
}

// walk handles the fields of a mapping.
func (c *configFile) walk(prefix string, mapping *yaml.Node) {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		field := prefix + key.Value
		flag, known := c.fields[field]
		row, isIgnored := fieldWithoutEffect(field)
		switch {
		case field == "apiVersion" && value.Value != configVersion, field == "kind" && value.Value != configKind:
			c.fail(value, "%s is %q, want a %s of %s", field, value.Value, configKind, configVersion)
		case field == "apiVersion" || field == "kind":
		case known && flag == "masquerade-all":
			c.bySection = append(c.bySection, setting{field, flag, value})
		case known:
			c.set(field, flag, value)
		case isIgnored:
			c.ignore(&row, field, value)
		case value.Kind == yaml.MappingNode && c.isSection(field):
			c.walk(field+".", value)
		default:
			c.fail(key, "%s: unknown field", field)
		}
	}
}

// choose sets the flags that several sections have from the mode's own section, when the mode
// is known. It records those of others that say something else.
func (c *configFile) choose(section string, m mode) {
	for _, s := range c.bySection {
		if text, _ := textOf(s.value); strings.HasPrefix(s.field, section+".") {
			c.set(s.field, s.flag, s.value)
		} else if !isZero(text) {
			c.ignored = append(c.ignored, ignored{s.field, fmt.Sprintf("with mode %s, the field of section %s counts", m, section)})
		}
	}
}

func (c *configFile) isSection(field string) bool {
	for known := range c.fields {
		if strings.HasPrefix(known, field+".") {
			return true
		}
	}
	return false
}

// set sets a flag, unless the command line has it, or the value means the default.
func (c *configFile) set(field, flag string, value *yaml.Node) {
	text, ok := textOf(value)
	if value.Kind == yaml.MappingNode && flag == "feature-gates" {
		text, ok = pairsOf(value), true
	}
	if !ok {
		c.fail(value, "%s: want a single value, or a list of them", field)
		return
	}
	if text == "" || zeroIsDefault(flag) && isZero(text) || c.flags.Changed(flag) {
		return
	}
	if err := c.flags.Set(flag, text); err != nil {
		c.fail(value, "%s: %v", field, err)
	}
}

// zeroIsDefault reports whether 0 and false mean the default, as in the files that kubeadm
// writes.
func zeroIsDefault(flag string) bool {
	return strings.HasSuffix(flag, "sync-period") ||
		slices.Contains([]string{"masquerade-all", "kube-api-qps", "kube-api-burst", "udp-timeout"}, flag)
}

// ignore records a field without effect if it is set.
func (c *configFile) ignore(row *noEffect, field string, value *yaml.Node) {
	if value.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(value.Content); i += 2 {
			c.ignore(row, field+"."+value.Content[i].Value, value.Content[i+1])
		}
		return
	}
	text, _ := textOf(value)
	if value.Kind == yaml.SequenceNode && len(value.Content) > 0 || !row.isDefault(text) {
		c.ignored = append(c.ignored, ignored{field, row.why})
	}
}

// textOf returns a value in the syntax of flags; null is empty.
func textOf(value *yaml.Node) (text string, ok bool) {
	switch value.Kind {
	case yaml.ScalarNode:
		if isNull(value) {
			return "", true
		}
		return value.Value, true
	case yaml.SequenceNode:
		var items []string
		for _, item := range value.Content {
			items = append(items, item.Value)
		}
		return strings.Join(items, ","), true
	case yaml.DocumentNode, yaml.MappingNode, yaml.AliasNode:
	}
	return "", false
}

func isNull(value *yaml.Node) bool { return value.Tag == "!!null" }

// pairsOf returns a mapping in the syntax of flags.
func pairsOf(mapping *yaml.Node) string {
	var pairs []string
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		pairs = append(pairs, mapping.Content[i].Value+"="+mapping.Content[i+1].Value)
	}
	return strings.Join(pairs, ",")
}

func isZero(text string) bool { return slices.Contains([]string{"", "0", "0s", "false"}, text) }
