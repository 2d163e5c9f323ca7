package informer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
)

// Each optional kind is missing or forbidden when Run starts, comes later, and goes again. Services are programmed
// and changed all the time, the log names what is missing, and what was known stays known. Only objects whose kind
// is gone are gone too.
func TestEachOptionalKind(t *testing.T) {
	t.Parallel()
	cidrs := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	for kind, object := range map[string]struct {
		is    runtime.Object
		known func(c *cluster) bool
		named string // in the log
	}{
		"nodes":          {node("me", "east"), func(c *cluster) bool { return c.proxier.Status().Node.Zone == "east" }, "Node"},
		"servicecidrs":   {cidr("all", "10.96.0.0/16"), func(c *cluster) bool { return slices.Equal(c.engine.Globals().ServiceCIDRs, cidrs) }, "ServiceCIDRs"},
		"serviceimports": {webImport("172.30.0.1"), func(c *cluster) bool { return strings.Contains(c.holds(), "172.30.0.1=") }, "ServiceImports"},
	} {
		for how, lacks := range map[string]apitest.Options{"missing": {Hidden: []string{kind}}, "forbidden": {Forbidden: []string{kind}}} {
			t.Run(kind+" "+how, func(t *testing.T) {
				t.Parallel()
				c := startCluster(t, lacks, Options{NodeName: "me", ServiceImports: true}, object.is, node("me", "east"), service("a", "10.96.0.1"))
				serves := func(when, ip string) {
					t.Helper()
					c.Put(t, slice("a", ip))
					poll.Until(t, when+": the endpoint "+ip, func() bool { return strings.Contains(c.holds(), "10.96.0.1="+ip) })
				}
				serves("at the start", "10.244.0.1")
				if object.known(c) {
					t.Error("it is known before it is there")
				}
				poll.Until(t, "the log names it", func() bool { return strings.Contains(logged(c), object.named) })
				c.Change(nil, nil)
				poll.Until(t, "it is known when it has come", func() bool { return object.known(c) })
				c.Change(lacks.Hidden, lacks.Forbidden)
				c.Stop()
				c.Start(t)
				serves("when it has gone", "10.244.0.2")
				gone := kind == "serviceimports" && how == "missing"
				poll.Until(t, "it is known if it may still be there", func() bool { return object.known(c) != gone })
				c.Change(nil, nil)
				serves("when it is back", "10.244.0.3")
				poll.Until(t, "it is known when it is back", func() bool { return object.known(c) })
			})
		}
	}
}

// logged is the whole log.
func logged(c *cluster) string {
	var text strings.Builder
	for _, line := range c.logs.All() {
		text.WriteString(line.Message)
		for _, f := range line.Context {
			fmt.Fprintf(&text, " %s%v", f.String, f.Interface)
		}
		text.WriteString("\n")
	}
	return text.String()
}
