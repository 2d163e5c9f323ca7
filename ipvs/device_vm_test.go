//go:build vm

package ipvs

import (
	"os/exec"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// bare is a network namespace for engines with any Names.
type bare struct {
	t  *testing.T
	ns string
}

func (b bare) engine(family v1.IPFamily, names proxier.Names) *engine {
	b.t.Helper()
	e, err := newEngine(Config{Config: proxier.Config{NetNS: b.ns, Names: names}, SetSysctls: true}, family, proxier.Deps{})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = e.Close() })
	return e
}

// apply creates an engine, as a new process does, and programs one Service.
func (b bare) apply(family v1.IPFamily, names proxier.Names, vip string) error {
	e := b.engine(family, names)
	defer func() { _ = e.Close() }() // the objects stay
	_, err := e.Apply(b.t.Context(), familyOf(family, service("web", vip, ofFamily(family, pod1, pod6))))
	return err
}

func familyOf(family v1.IPFamily, services ...*desired.Service) desired.Update {
	u := full(services...)
	u.Family = family
	u.Globals.NodePortAddresses = nil
	return u
}

func ofFamily(family v1.IPFamily, v4, v6 string) string {
	if family == v1.IPv6Protocol {
		return v6
	}
	return v4
}

func (b bare) run(program string, args ...string) string {
	b.t.Helper()
	out, err := b.try(program, args...)
	if err != nil {
		b.t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return out
}

func (b bare) try(program string, args ...string) (string, error) {
	var out []byte
	err := namespace.Visit(b.ns, func() (err error) {
		out, err = exec.CommandContext(b.t.Context(), program, args...).CombinedOutput()
		return err
	})
	return string(out), err
}

const (
	webVIP6, dnsVIP6 = "2001:db8:1::1", "2001:db8:1::2"
	pod6             = "[2001:db8::1]:8080"
)

// TestForeignDevice: another program's device with the name of the instance's device stays as
// it is, with its addresses and virtual servers. Syncs fail until it is deleted.
func TestForeignDevice(t *testing.T) {
	own, kubeProxy := proxier.DefaultNames(), proxier.KubeProxyNames()
	edge, err := proxier.NamesFor("edge")
	if err != nil {
		t.Fatal(err)
	}
	named := func(n proxier.Names, device string) proxier.Names {
		n.Device = device
		return n
	}
	link := func(kind string) func(b bare, device string) {
		return func(b bare, device string) { b.run("ip", "link", "add", device, "type", kind) }
	}
	otherInstance := func(b bare, device string) {
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			if err := b.apply(family, named(edge, device), ofFamily(family, dnsVIP, dnsVIP6)); err != nil {
				b.t.Fatal(err)
			}
		}
	}
	for what, c := range map[string]struct {
		names proxier.Names
		make  func(b bare, device string)
	}{
		"dummy":                              {own, link("dummy")},
		"bridge":                             {own, link("bridge")},
		"another instance's":                 {own, otherInstance},
		"kube-proxy's, for another instance": {named(edge, kubeProxy.Device), link("dummy")},
		"another instance's, for kube-proxy": {kubeProxy, otherInstance},
		"dummy, for kube-proxy's other name": {named(kubeProxy, own.Device), link("dummy")},
		"bridge of kube-proxy's name":        {kubeProxy, link("bridge")},
	} {
		t.Run(what, func(t *testing.T) {
			b := bare{t, netnstest.New(t).Path()}
			device := c.names.Device
			c.make(b, device)
			for _, address := range []string{webVIP + "/32", "203.0.113.77/32", webVIP6 + "/128", "2001:db8:77::1/128"} {
				b.run("ip", "addr", "add", address, "dev", device)
			}
			b.run("ipvsadm", "-A", "-t", "203.0.113.77:80")
			b.run("ipvsadm", "-A", "-t", "[2001:db8:77::1]:80")
			look := func() string { return b.run("ip", "addr", "show", "dev", device) + b.run("ipvsadm", "-Ln") }
			before := look()
			for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
				err := b.apply(family, c.names, ofFamily(family, webVIP, webVIP6))
				if err == nil || !strings.Contains(err.Error(), "device "+device) || !strings.Contains(err.Error(), "ip link delete "+device) {
					t.Errorf("%s: Apply = %v, want an error that names the device, and what to do", family, err)
				}
				if err := b.engine(family, c.names).Cleanup(t.Context()); err != nil {
					t.Errorf("%s: Cleanup = %v, want nil: the instance has no objects", family, err)
				}
			}
			if got := look(); got != before {
				t.Errorf("there is\n%swant what was there before\n%s", got, before)
			}
			b.run("ip", "link", "delete", device)
			for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
				if err := b.apply(family, c.names, ofFamily(family, webVIP, webVIP6)); err != nil {
					t.Errorf("%s: Apply = %v when the device has gone", family, err)
				}
			}
			b.cleansUp(c.names)
		})
	}
}

// cleansUp cleans up one family after the other. The last one deletes the device.
func (b bare) cleansUp(names proxier.Names) {
	b.t.Helper()
	for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
		if out, err := b.try("ip", "addr", "show", "dev", names.Device); err != nil || !strings.Contains(out, webVIP6) {
			b.t.Errorf("before the clean-up of %s there is %v\n%swant the device with address %s", family, err, out, webVIP6)
		}
		if err := b.engine(family, names).Cleanup(b.t.Context()); err != nil {
			b.t.Errorf("%s: Cleanup = %v", family, err)
		}
	}
	if out, err := b.try("ip", "link", "show", "dev", names.Device); err == nil {
		b.t.Errorf("after the clean-up there is\n%swant no device", out)
	}
}

// Both families make one device at the same time, and a second process recognizes it.
func TestBothFamiliesMakeOneDevice(t *testing.T) {
	b := bare{t, netnstest.New(t).Path()}
	names := proxier.DefaultNames()
	for range 2 {
		var starting sync.WaitGroup
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			starting.Go(func() {
				if err := b.apply(family, names, ofFamily(family, webVIP, webVIP6)); err != nil {
					t.Errorf("%s: Apply = %v", family, err)
				}
			})
		}
		starting.Wait()
	}
	b.cleansUp(names)
}
