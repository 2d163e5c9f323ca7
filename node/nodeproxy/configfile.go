package nodeproxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// The kind of file that --config reads, as kube-proxy does.
const (
	configGroup   = "kubeproxy.config.k8s.io" // also the key of the configuration in kube-proxy's /configz
	configVersion = configGroup + "/v1alpha1"
	configKind    = "KubeProxyConfiguration"
)

// configFields returns all fields of KubeProxyConfiguration of v1alpha1 in 1.37, as an older kube-proxy refuses to
// start with fields that it does not know. Each row is a field and its flag, if it has one.
func configFields() []string {
	all := []string{
		"apiVersion=", "kind=", "mode=proxy-mode", "featureGates=feature-gates", "hostnameOverride=hostname-override",
		"clientConnection.kubeconfig=kubeconfig", "clientConnection.acceptContentTypes=", "clientConnection.contentType=kube-api-content-type",
		"clientConnection.qps=kube-api-qps", "clientConnection.burst=kube-api-burst",
		"logging.format=logging-format", "logging.flushFrequency=", "logging.verbosity=v",
		"clusterCIDR=cluster-cidr", "detectLocalMode=detect-local-mode",
		"detectLocal.bridgeInterface=pod-bridge-interface", "detectLocal.interfaceNamePrefix=pod-interface-name-prefix",
		"nodePortAddresses=nodeport-addresses", "portRange=proxy-port-range", "configSyncPeriod=config-sync-period",
		"bindAddress=bind-address", "bindAddressHardFail=bind-address-hard-fail",
		"healthzBindAddress=healthz-bind-address", "metricsBindAddress=metrics-bind-address", "enableProfiling=profiling",
		"showHiddenMetricsForVersion=", "oomScoreAdj=oom-score-adj",
	}
	for _, m := range []mode{modeNFTables, modeIPTables, modeIPVS} {
		section, flag := string(m)+".", string(m)+"-"
		if m != modeIPVS {
			all = append(all, section+"masqueradeBit="+flag+"masquerade-bit", section+"masqueradeAll=masquerade-all")
		}
		all = append(all, section+"syncPeriod="+flag+"sync-period", section+"minSyncPeriod="+flag+"min-sync-period")
	}
	return append(all, []string{
		"iptables.localhostNodePorts=iptables-localhost-nodeports",
		"ipvs.scheduler=ipvs-scheduler", "ipvs.excludeCIDRs=ipvs-exclude-cidrs", "ipvs.strictARP=ipvs-strict-arp",
		"ipvs.tcpTimeout=ipvs-tcp-timeout", "ipvs.tcpFinTimeout=ipvs-tcpfin-timeout", "ipvs.udpTimeout=ipvs-udp-timeout",
		"winkernel.networkName=", "winkernel.sourceVip=", "winkernel.enableDSR=",
		"winkernel.rootHnsEndpointName=", "winkernel.forwardHealthCheckVip=",
		"conntrack.maxPerCore=conntrack-max-per-core", "conntrack.min=conntrack-min",
		"conntrack.tcpEstablishedTimeout=conntrack-tcp-timeout-established", "conntrack.tcpCloseWaitTimeout=conntrack-tcp-timeout-close-wait",
		"conntrack.tcpBeLiberal=conntrack-tcp-be-liberal",
		"conntrack.udpTimeout=conntrack-udp-timeout", "conntrack.udpStreamTimeout=conntrack-udp-timeout-stream",
	}...)
}

// flagsOfFields returns the flags of the file's fields.
func flagsOfFields() map[string]string {
	flags := map[string]string{"udpIdleTimeout": "udp-timeout"} // of v1alpha1 until 1.25
	for _, row := range configFields() {
		if field, flag, _ := strings.Cut(row, "="); flag != "" {
			flags[field] = flag
		}
	}
	return flags
}

// configFile sets flags from a KubeProxyConfiguration. Flags of the command line override
// it.
type configFile struct {
	path      string
	flags     *pflag.FlagSet
	fields    map[string]string
	origins   map[string]string // the place and the name of the field that set a flag
	bySection []setting         // fields of several sections that have one flag
	ignored   []ignored
	errs      []error
}

// setting is a field with its flag and its value.
type setting struct {
	field, flag string
	value       *yaml.Node
}

// readFields sets the flags of the configuration's fields, if there is one. It returns the fields without
// effect that are set.
func (o *options) readFields(flags *pflag.FlagSet) ([]ignored, error) {
	path, text := "configuration", o.program.Configuration
	if o.configFile != "" {
		var err error
		path = o.configFile
		if text, err = os.ReadFile(path); err != nil {
			return nil, fmt.Errorf("--config=%s: read configuration: %w", path, err)
		}
	}
	if text == nil {
		return nil, nil
	}
	document, err := parseYAML(path, text)
	if err != nil {
		return nil, err
	}
	o.origins = map[string]string{}
	c := &configFile{path: path, flags: flags, fields: flagsOfFields(), origins: o.origins}
	if len(document.Content) != 1 || document.Content[0].Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s: want a %s of %s", path, configKind, configVersion)
	}
	c.walk("", document.Content[0])
	c.choose(o.section(), o.mode())
	return c.ignored, errors.Join(c.errs...)
}

func (c *configFile) fail(at *yaml.Node, format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf("%s:%d: %s", c.path, at.Line, fmt.Sprintf(format, args...)))
}

// walk handles the fields of a mapping. Those that nodeproxy does not know have no effect, as
// kube-proxy accepts them too: a DaemonSet must start with the file that it has.
func (c *configFile) walk(prefix string, mapping *yaml.Node) {
	for _, e := range entriesOf(mapping) {
		key, value := e.key, e.value
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
		case c.example(field) == "":
			c.ignored = append(c.ignored, ignored{fmt.Sprintf("%s:%d: %s", c.path, key.Line, field), "nodeproxy does not know this field"})
		case value.Kind == yaml.MappingNode:
			c.walk(field+".", value)
		case !isNull(value):
			c.fail(value, "%s: want fields such as %s, or nothing", field, c.example(field))
		}
	}
}

// choose sets the flags that several sections have from the mode's own section, when the mode
// is known. It records those of others that say something else.
func (c *configFile) choose(section string, m mode) {
	for _, s := range c.bySection {
		if text, _ := textOf(s.value, c.flags.Lookup(s.flag)); strings.HasPrefix(s.field, section+".") {
			c.set(s.field, s.flag, s.value)
		} else if !isZero(text) {
			c.ignored = append(c.ignored, ignored{s.field, fmt.Sprintf("with mode %s, the field of section %s counts", m, section)})
		}
	}
}

// example returns a field of a section; empty if it is none.
func (c *configFile) example(section string) string {
	for _, known := range slices.Sorted(maps.Keys(c.fields)) {
		if inner, ok := strings.CutPrefix(known, section+"."); ok {
			return inner
		}
	}
	return ""
}

// set sets a flag, unless the command line has it, or the value means the default.
func (c *configFile) set(field, flag string, value *yaml.Node) {
	f := c.flags.Lookup(flag)
	text, ok := textOf(value, f)
	if !ok {
		c.fail(value, "%s: want %s", field, wanted(f))
		return
	}
	if text == "" || zeroIsDefault(flag) && isZero(text) || c.flags.Changed(flag) {
		return
	}
	if err := setStrictly(c.flags, f, text); err != nil {
		c.fail(value, "%s: %s: want %s", field, text, wanted(f))
		return
	}
	c.origins[flag] = fmt.Sprintf("%s:%d: %s", c.path, value.Line, field)
}

// zeroIsDefault reports whether 0 and false mean the default, as in the files that kubeadm
// writes.
func zeroIsDefault(flag string) bool {
	return strings.HasSuffix(flag, "sync-period") ||
		slices.Contains([]string{"masquerade-all", "kube-api-qps", "kube-api-burst", "udp-timeout"}, flag)
}

// ignore records a field without effect if it is set.
func (c *configFile) ignore(row *noEffect, field string, value *yaml.Node) {
	switch value.Kind {
	case yaml.MappingNode:
		for _, e := range entriesOf(value) {
			c.ignore(row, field+"."+e.key.Value, e.value)
		}
	case yaml.SequenceNode:
		if len(value.Content) > 0 {
			c.ignored = append(c.ignored, ignored{field, row.why})
		}
	case yaml.ScalarNode:
		if !isNull(value) && !row.isDefault(value.Value) {
			c.ignored = append(c.ignored, ignored{field, row.why})
		}
	case yaml.DocumentNode, yaml.AliasNode: // entriesOf has followed aliases
	}
}

// textOf returns a value in the syntax of a flag; null is empty.
func textOf(value *yaml.Node, f *pflag.Flag) (text string, ok bool) {
	kind := f.Value.Type()
	var items []string
	switch {
	case isNull(value):
		return "", true
	case value.Kind == yaml.ScalarNode && kind == "bool":
		return truthOf(value), true
	case value.Kind == yaml.ScalarNode:
		return value.Value, true
	case value.Kind == yaml.SequenceNode && kind == "stringSlice":
		for _, item := range value.Content {
			if item = behindAlias(item); item.Kind != yaml.ScalarNode {
				return "", false
			}
			items = append(items, item.Value)
		}
	case value.Kind == yaml.MappingNode && kind == gatesType:
		for _, e := range entriesOf(value) {
			if e.value.Kind != yaml.ScalarNode {
				return "", false
			}
			items = append(items, e.key.Value+"="+truthOf(e.value))
		}
	default:
		return "", false
	}
	return strings.Join(items, ","), true
}

// wanted says what a flag's field may be.
func wanted(f *pflag.Flag) string {
	switch f.Value.Type() {
	case "bool":
		return "true or false"
	case "int", "int32":
		return "a whole number"
	case "float32":
		return "a number"
	case "duration":
		return "a duration such as 30s, 15m or 1h"
	case "stringSlice":
		return "a list such as [a, b]"
	case gatesType:
		return "names with true or false, such as {NAME: true}"
	}
	return "a single value"
}

func isZero(text string) bool { return slices.Contains([]string{"", "0", "0s", "false"}, text) }

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

func isNull(value *yaml.Node) bool { return value.Kind == yaml.ScalarNode && value.Tag == "!!null" }

// behindAlias returns what an alias stands for.
func behindAlias(value *yaml.Node) *yaml.Node {
	for value.Kind == yaml.AliasNode { // parseYAML has refused those without an end
		value = value.Alias
	}
	return value
}

// entry is a key of a mapping with its value.
type entry struct{ key, value *yaml.Node }

// entriesOf returns the entries of a mapping, in their order, and after them what it merges by
// the key "<<" and does not have itself.
func entriesOf(mapping *yaml.Node) (all []entry) {
	var merged []*yaml.Node
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		key, value := behindAlias(mapping.Content[i]), behindAlias(mapping.Content[i+1])
		switch {
		case key.Tag != "!!merge":
			all = append(all, entry{key, value})
		case value.Kind == yaml.SequenceNode:
			merged = append(merged, value.Content...)
		default:
			merged = append(merged, value)
		}
	}
	for _, other := range merged {
		for _, e := range entriesOf(behindAlias(other)) {
			if !slices.ContainsFunc(all, func(own entry) bool { return own.key.Value == e.key.Value }) {
				all = append(all, e)
			}
		}
	}
	return all
}

// truthOf returns true and false as flags have them. YAML 1.1, which kube-proxy reads, has other
// words for them, if they are not in quotes.
func truthOf(value *yaml.Node) string {
	if value.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) == 0 {
		switch strings.ToLower(value.Value) {
		case "y", "yes", "on":
			return "true"
		case "n", "no", "off":
			return "false"
		}
	}
	return value.Value
}
