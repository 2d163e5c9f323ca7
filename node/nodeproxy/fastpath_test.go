package nodeproxy

import (
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

func fastPathOf(t *testing.T, args ...string) (p nftablesFlags, errs faults) {
	t.Helper()
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	p.register(set)
	if err := set.Parse(args); err != nil {
		t.Fatal(err)
	}
	p.validate(&errs)
	return p, errs
}

func TestServicesAskForTheFastPath(t *testing.T) {
	for flag, want := range map[string]map[string]bool{
		"off":       {"": false, "true": false, "false": false},
		"annotated": {"": false, "true": true, "false": false, "maybe": false},
		"all":       {"": true, "true": true, "false": false, "maybe": true},
	} {
		for text, asks := range want {
			log, logs := observer.New(zapcore.WarnLevel)
			p, errs := fastPathOf(t, "--nftables-fast-path="+flag)
			var port changetracker.ServicePort
			p.decorate(newAnnotations(zap.New(log)), &port, proxiertest.Service("test", "web", func(s *v1.Service) {
				if text != "" {
					s.Annotations = annotated(fastPathAnnotation, text)
				}
			}))
			if port.FastPath != asks || len(errs) != 0 || (logs.Len() == 1) != (text == "maybe") {
				t.Errorf("--nftables-fast-path=%s, annotation %q: asks %v, errors %v, %d lines; want %v", flag, text, port.FastPath, errs, logs.Len(), asks)
			}
		}
	}
}

func TestTheFastPathIsConfigured(t *testing.T) {
	off, _ := fastPathOf(t)
	if c := off.config(proxier.Config{}); c.FastPathAfter != 0 {
		t.Errorf("without flags after %d packets, want never", c.FastPathAfter)
	}
	all, errs := fastPathOf(t, "--nftables-fast-path=all")
	if c := all.config(proxier.Config{}); c.FastPathAfter != 20 || c.FastPathDevice != nil || len(errs) != 0 {
		t.Errorf("after %d packets, all devices %t, errors %v; want 20 and all", c.FastPathAfter, c.FastPathDevice == nil, errs)
	}
	some, errs := fastPathOf(t, "--nftables-fast-path=all", "--nftables-fast-path-after=7", "--nftables-fast-path-devices=eth*,cali*")
	c := some.config(proxier.Config{})
	for device, want := range map[string]bool{"eth0": true, "cali1": true, "docker0": false} {
		if got := c.FastPathDevice(device); got != want || c.FastPathAfter != 7 || len(errs) != 0 {
			t.Errorf("device %s takes part: %t, after %d packets, errors %v; want %t, 7", device, got, c.FastPathAfter, errs, want)
		}
	}
	for _, wrong := range []string{"--nftables-fast-path=yes", "--nftables-fast-path-after=0", "--nftables-fast-path=all --nftables-fast-path-devices=[", "--nftables-fast-path-devices=eth0"} {
		if _, errs := fastPathOf(t, strings.Fields(wrong)...); len(errs) != 1 {
			t.Errorf("%s: errors %v, want one", wrong, errs)
		}
	}
}
