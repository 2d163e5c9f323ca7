package proxier_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/proxier"
)

func TestNamesForFitsTheKernelsLimits(t *testing.T) {
	for instance, valid := range map[string]bool{
		"a": true, "edge": true, "edge-02": true, "1234567": true,
		"": false, "12345678": false, "Edge": false, "-edge": false, "edge-": false, "a b": false, "a/b": false, "é": false,
	} {
		names, err := proxier.NamesFor(instance)
		if valid && (err != nil || names.Validate() != nil) {
			t.Errorf("NamesFor(%q) = %+v, %v, want valid names", instance, names, err)
		}
		if !valid && !errors.Is(err, proxier.ErrInvalidConfig) {
			t.Errorf("NamesFor(%q) = %+v, %v, want ErrInvalidConfig", instance, names, err)
		}
	}
}

func TestThePresetsAreValidAndDiffer(t *testing.T) {
	presets := []proxier.Names{proxier.DefaultNames(), proxier.KubeProxyNames()}
	for _, n := range presets {
		if err := n.Validate(); err != nil {
			t.Errorf("%+v: %v", n, err)
		}
	}
	if a, b := presets[0], presets[1]; a.Table == b.Table || a.ChainPrefix == b.ChainPrefix || a.Device == b.Device {
		t.Errorf("two instances share a name: %+v, %+v", a, b)
	}
}

// Chain prefixes of others are refused in upper and lower case, and so are prefixes with a hyphen.
func TestChainPrefixesOfOthersAreRefused(t *testing.T) {
	for prefix, valid := range map[string]bool{
		"MINE": true, "SPL_MINE": true, "my.own": true, "LONGEST_POS": true, "TOO_LONG_BY1": false,
		"KUBE": false, "kube": false, "DOCKER": false, "CNI": false, "cali": false, "ANTREA": false, "ISTIO": false, "CRIO": false, "INPUT": false,
		"MINE-OWN": false, "KUBE-HP": false, "-": false,
	} {
		n := proxier.DefaultNames()
		n.Instance, n.ChainPrefix = "mine", prefix
		if err := n.Validate(); (err == nil) != valid || err != nil && !errors.Is(err, proxier.ErrInvalidConfig) {
			t.Errorf("ChainPrefix %q: Validate = %v, want valid %v", prefix, err, valid)
		}
	}
	if err := proxier.KubeProxyNames().Validate(); err != nil {
		t.Errorf("kube-proxy's names: Validate = %v, want nil", err)
	}
}

// TestInterfaceNames: what an engine's language reads as something else is not accepted.
func TestInterfaceNames(t *testing.T) {
	for _, name := range []string{"veth", "cali", "eni", "vxlan.calico", "br-0a1b", "cni_0", "bond0.5@x", "a23456789012345"} {
		if !proxier.ValidInterfaceName(name) {
			t.Errorf("%q is not accepted", name)
		}
	}
	for part := range strings.SplitSeq(" |\t|\n|\x00|\x7f|\"|'|`|\\|/|:|*|+|!|,|;|é|\xff|0123456789012345", "|") {
		for _, name := range []string{part, "veth" + part, part + "veth", "ve" + part + "th"} {
			for _, m := range []proxier.Masquerade{{PodInterface: name}, {PodInterfacePrefix: name}} {
				config := proxier.Config{Masquerade: m}.WithDefaults()
				if err := config.Validate(); err == nil || !errors.Is(err, proxier.ErrInvalidConfig) {
					t.Errorf("%+q: Validate = %v, want an error", name, err)
				}
			}
		}
	}
	if proxier.ValidInterfaceName("") {
		t.Error("the empty name is accepted")
	}
}

func TestValidateNamesEveryBadField(t *testing.T) {
	prefix := netip.MustParsePrefix("10.0.0.0/8")
	for field, change := range map[string]func(*proxier.Config){
		"Families":                    func(c *proxier.Config) { c.Families = append(c.Families, c.Families[0]) },
		"FullSyncPeriod":              func(c *proxier.Config) { c.FullSyncPeriod = -time.Second },
		"Masquerade.Mark":             func(c *proxier.Config) { c.Masquerade.Mark = 0x6000 },
		"Masquerade":                  func(c *proxier.Config) { c.Masquerade.NodePodCIDRs, c.Masquerade.PodInterface = true, "cni0" },
		"Masquerade.PodCIDRs[1]":      func(c *proxier.Config) { c.Masquerade.PodCIDRs = []netip.Prefix{prefix, {}} },
		"Masquerade.PodInterface":     func(c *proxier.Config) { c.Masquerade.PodInterface = strings.Repeat("x", 16) },
		"Kinds[1]":                    func(c *proxier.Config) { c.Kinds = []desired.Kind{desired.ClusterIP, 9} },
		"NodePorts.Addresses[0]":      func(c *proxier.Config) { c.NodePorts.Addresses = []netip.Prefix{{}} },
		"Names.Table":                 func(c *proxier.Config) { c.Names.Table = "" },
		"is longer than 239 bytes":    func(c *proxier.Config) { c.Names.Table = strings.Repeat("t", 240) },
		"Runner: MaxInterval":         func(c *proxier.Config) { c.Runner.MaxInterval = -time.Second },
		"Masquerade.PodInterfacePref": func(c *proxier.Config) { c.Masquerade.PodInterfacePrefix = strings.Repeat("x", 16) },
	} {
		config := proxier.Config{}.WithDefaults()
		if err := config.Validate(); err != nil {
			t.Fatalf("the zero value is not valid: %v", err)
		}
		change(&config)
		err := config.Validate()
		if !errors.Is(err, proxier.ErrInvalidConfig) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: Validate = %v, want an error that names the field", field, err)
		}
	}
}

func ExampleNamesFor() {
	names, err := proxier.NamesFor("edge")
	fmt.Println(names.Table, names.Device, err)
	_, err = proxier.NamesFor("a name that is too long")
	fmt.Println(err)
	// Output:
	// serviceplane-edge edge-svc0 <nil>
	// invalid configuration: instance "a name that is too long": want 1 to 7 lower-case letters, digits or inner hyphens
}
