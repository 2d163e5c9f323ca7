package nodeproxy

import (
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/informer"
)

// TestOneParserOfAddresses: what a Service may have as an address or a range, flags and the Node may
// have too, with the same meaning (TRK-15).
func TestOneParserOfAddresses(t *testing.T) {
	type address struct{ text, want string }
	ranges := func(of func(o *options) ([]netip.Prefix, error), flag string) func(a address) (string, error) {
		return func(a address) (string, error) {
			list, err := of(parse(t, "--"+flag+"="+a.text+"/128"))
			if netip.MustParseAddr(a.want).Is4() {
				list, err = of(parse(t, "--"+flag+"="+a.text+"/032"))
			}
			if len(list) != 1 {
				return "", err
			}
			return list[0].Addr().String(), err
		}
	}
	places := map[string]func(a address) (string, error){
		"cluster-cidr": ranges(func(o *options) ([]netip.Prefix, error) {
			c, err := o.config("n")
			return c.Masquerade.PodCIDRs, err
		}, "cluster-cidr"),
		"nodeport-addresses": ranges(func(o *options) ([]netip.Prefix, error) {
			c, err := o.config("n")
			return c.NodePorts.Addresses, err
		}, "nodeport-addresses"),
		"denied-external-ips": ranges(func(o *options) ([]netip.Prefix, error) {
			c, err := o.config("n")
			return c.Tracker.DeniedExternalIPs, err
		}, "denied-external-ips"),
		"ipvs-exclude-cidrs": ranges(func(o *options) ([]netip.Prefix, error) {
			list, _ := parsePrefixes(o.ipvs.exclude)
			return list, o.Validate()
		}, "ipvs-exclude-cidrs"),
		"canary-vips": func(a address) (string, error) {
			o := parse(t, "--canary-vips="+a.text)
			vips, _ := o.canary.addresses()
			if len(vips) != 1 {
				return "", o.Validate()
			}
			return vips[0].String(), o.Validate()
		},
		"healthz-bind-address": func(a address) (string, error) {
			text, err := bindAddress(a.text, 99)
			bound, _ := netip.ParseAddrPort(text)
			return bound.Addr().String(), err
		},
		"metrics-bind-address with a port": func(a address) (string, error) {
			text := a.text + ":88"
			if netip.MustParseAddr(a.want).Is6() {
				text = "[" + a.text + "]:88"
			}
			text, err := bindAddress(text, 99)
			bound, _ := netip.ParseAddrPort(text)
			return bound.Addr().String(), err
		},
		"bind-address": func(a address) (string, error) {
			return a.want, parse(t, "--bind-address="+a.text).Validate()
		},
		"an address of the Node": func(a address) (string, error) {
			n := informer.NodeOf(&v1.Node{Status: v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: a.text}}}})
			if len(n.Addresses) != 1 {
				return "", nil
			}
			return n.Addresses[0].String(), nil
		},
		"a pod CIDR of the Node": func(a address) (string, error) {
			n := informer.NodeOf(&v1.Node{Spec: v1.NodeSpec{PodCIDRs: []string{a.text + "/24"}}})
			if len(n.PodCIDRs) != 1 || !n.PodCIDRs[0].Contains(netip.MustParseAddr(a.want)) {
				return "", nil
			}
			return a.want, nil
		},
	}
	for _, a := range []address{{"192.0.2.9", "192.0.2.9"}, {"192.000.002.009", "192.0.2.9"}, {"010.001.02.3", "10.1.2.3"}, {" 010.1.2.3", "10.1.2.3"}, {"2001:0db8::0001", "2001:db8::1"}} {
		for place, read := range places {
			if got, err := read(a); got != a.want || err != nil {
				t.Errorf("%s: %q is read as %q, error %v, want %s", place, a.text, got, err, a.want)
			}
		}
	}
}
