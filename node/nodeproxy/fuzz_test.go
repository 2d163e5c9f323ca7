package nodeproxy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// FuzzConfigFile: each error names the file, the same file sets the same flags, and only valid
// options are used.
func FuzzConfigFile(f *testing.F) {
	const head = "apiVersion: " + configVersion + "\nkind: " + configKind + "\n"
	for _, text := range []string{
		"mode: iptables\nnodePortAddresses: [192.0.2.0/24]\nfeatureGates: {A: true}\nconntrack: {min: 0, tcpBeLiberal: true}\n",
		"a: &x {b: *x}\nmode: [*x]\n", "iptables: {syncPeriod: 30s, x: 1}\nwinkernel: {}\n", "? [mode]\n: ipvs\n<<: {mode: x}\n", "clusterCIDR: !!binary aGk=\n",
	} {
		f.Add([]byte(head + text))
	}
	file := filepath.Join(f.TempDir(), "config.yaml")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		read := func() string {
			o, flags := &options{}, pflag.NewFlagSet("test", pflag.ContinueOnError)
			o.register(flags)
			o.configFile = file
			ignored, err := o.readFields(flags)
			if err != nil && !strings.HasPrefix(err.Error(), file+":") {
				t.Errorf("error %q does not name the file", err)
			}
			return fmt.Sprint(flagValues(flags), ignored, err)
		}
		if first, second := read(), read(); first != second {
			t.Errorf("read as\n%s\nand again as\n%s", first, second)
		}
	})
}

// FuzzHealthAnnotation: a check that is accepted is off, passive, or has a probe.
func FuzzHealthAnnotation(f *testing.F) {
	for _, text := range []string{"off", "tcp port=80 interval=1s", "http path=/x status=200-399 host=a", "connections failures=3", "http path=%zz", "tcp interval=-1s"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		h := healthFlags{maxEjected: 50}
		policy, ok, err := h.parse(text)
		if ok && err == nil && policy.Probe == nil && policy.PassiveFailures < 0 {
			t.Errorf("%q checks nothing: %+v", text, policy)
		}
	})
}

// FuzzAccept: what a client accepts is ordered by its quality, which is more than 0.
func FuzzAccept(f *testing.F) {
	f.Add("text/plain;q=0.5, application/json;v=v1beta1;g=config.k8s.io;as=Flagz")
	f.Add("*/*;q=nan, text/*;q=1e9, text/plain; charset=utf-8")
	f.Fuzz(func(t *testing.T, header string) {
		all := parseAccept([]string{header})
		for i, a := range all {
			if !(a.quality > 0) || i > 0 && a.quality > all[i-1].quality {
				t.Errorf("%q: %+v", header, all)
			}
		}
	})
}

// FuzzPorts: a range that is accepted is read again from its first and last port.
func FuzzPorts(f *testing.F) {
	for _, text := range []string{"20000-21000", "20000+1000", "80", "0-0", " 1-65535", "65535+1", "+5"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ports, err := parsePorts(text)
		if err != nil {
			return
		}
		if again, err := parsePorts(fmt.Sprintf("%d-%d", ports.First, ports.Last)); err != nil || again != ports {
			t.Errorf("%q is %+v; printed and read again it is %+v, %v", text, ports, again, err)
		}
	})
}
