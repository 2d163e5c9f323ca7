//go:build !vm

package ipvs

import (
	"errors"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/proxier"
)

// TestAKernelWithoutIPVS: the error names the missing module, and Cleanup succeeds.
func TestAKernelWithoutIPVS(t *testing.T) {
	ns := netnstest.New(t)
	if findIPVS() == nil {
		t.Skip("this kernel has IPVS")
	}
	e, err := newEngine(Config{Config: proxier.Config{NetNS: ns.Path()}}, v1.IPv4Protocol, proxier.Deps{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.Apply(t.Context(), desired.Update{Family: v1.IPv4Protocol, Full: true})
	var lacks *proxier.UnsupportedError
	if !errors.As(err, &lacks) || lacks.Feature != "IPVS" || !strings.Contains(lacks.Hint, "ip_vs") {
		t.Errorf("Apply = %v, want an UnsupportedError about IPVS that names the module", err)
	}
	if err := e.Cleanup(t.Context()); err != nil {
		t.Errorf("Cleanup = %v, want nil", err)
	}
}
