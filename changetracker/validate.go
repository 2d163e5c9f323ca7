package changetracker

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// ErrInvalidOptions is what every error of Options.Validate wraps.
var ErrInvalidOptions = errors.New("invalid tracker options")

// Validate returns every invalid field, with its value.
func (o *Options) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s", ErrInvalidOptions, fmt.Sprintf(format, args...)))
	}
	for i, name := range o.Families {
		if _, ok := familyIndex(name); !ok {
			bad("Families[%d]: %q is not an IP family", i, name)
		}
		if slices.Contains(o.Families[:i], name) {
			bad("Families[%d]: %q is listed twice", i, name)
		}
	}
	for i, name := range o.AwaitSources {
		if name == "" || slices.Contains(o.AwaitSources[:i], name) {
			bad("AwaitSources[%d]: %q is empty or listed twice", i, name)
		}
	}
	for i, a := range o.Node.Addresses {
		if !dialable(a.Unmap()) {
			bad("Node.Addresses[%d]: %v cannot be an address of a node", i, a)
		}
	}
	for i, p := range o.Node.PodCIDRs {
		if !p.IsValid() {
			bad("Node.PodCIDRs[%d]: %v is not a prefix", i, p)
		}
	}
	for i, p := range o.DeniedExternalIPs {
		if !p.IsValid() {
			bad("ExternalIPs.Denied[%d]: %v is not a prefix", i, p)
		}
	}
	if faults := validation.IsValidLabelValue(o.ServiceProxyName); len(faults) > 0 {
		bad("ServiceProxyName: %q: %s", readable(o.ServiceProxyName), strings.Join(faults, "; "))
	}
	return errors.Join(errs...)
}
