package canary

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/invalid"
)

// The defaults of Options.
const (
	defaultInterval  = 10 * time.Second
	defaultTimeout   = 2 * time.Second
	defaultThreshold = 30 * time.Second
)

// Options configure New. The zero value is ready for use.
type Options struct {
	// VIPs are the reserved addresses, at most one of each IP family; nil means 192.0.0.7 and
	// 100::7. A family without a VIP is not tested.
	VIPs []netip.Addr
	// Interval is the mean time from one test to the next, which varies by a tenth; 0 means
	// 10s. Until the first success, and after a failure, it is a quarter of that.
	Interval time.Duration
	// Timeout bounds one test; 0 means 2s, three transmissions of a SYN packet.
	Timeout time.Duration
	// Threshold is for how long tests must fail, with no success in between, until the state
	// is StateFailing; 0 means 30s.
	Threshold time.Duration
	// NetNS is that of proxier.Config: the network namespace that the proxy programs. Empty
	// means that of the process.
	NetNS string
	// Explain, if set, is called when a test fails, at most once in Threshold, with the context
	// of one more test. It may call connect, which is that test, and returns what stops the
	// packets and what to do, such as "stopped by the policy drop of chain input in table inet
	// x". An empty text means that it does not know. packettrace.ExplainTest returns such a function.
	Explain func(ctx context.Context, vip, endpoint netip.AddrPort, connect func(ctx context.Context) error) string
	// Logger receives one line at each change of state; nil means no logging.
	Logger *zap.Logger
}

// withDefaults replaces zero values.
func (o Options) withDefaults() Options {
	if o.VIPs == nil {
		o.VIPs = []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 0, 7}), netip.MustParseAddr("100::7")}
	}
	o.Interval = cmp.Or(o.Interval, defaultInterval)
	o.Timeout = cmp.Or(o.Timeout, defaultTimeout)
	o.Threshold = cmp.Or(o.Threshold, defaultThreshold)
	o.Logger = cmp.Or(o.Logger, zap.NewNop())
	return o
}

// Validate reports every invalid option.
func (o Options) Validate() error {
	o = o.withDefaults()
	var errs invalid.Options
	seen := map[v1.IPFamily]bool{}
	for _, vip := range o.VIPs {
		special := vip.Is4In6() || vip.IsUnspecified() || vip.IsLoopback() || vip.IsMulticast() || vip.IsLinkLocalUnicast()
		isUsable := vip.IsValid() && vip.Zone() == "" && !special
		errs.Check(isUsable, "VIPs", vip, "a unicast address that is neither loopback nor link-local")
		errs.Check(!isUsable || !seen[familyOf(vip)], "VIPs", vip, "one address of each IP family")
		seen[familyOf(vip)] = true
	}
	errs.Check(o.Interval >= 0, "Interval", o.Interval, "0 or more")
	errs.Check(o.Timeout >= 0, "Timeout", o.Timeout, "0 or more")
	errs.Check(o.Threshold >= 0, "Threshold", o.Threshold, "0 or more")
	return errors.Join(errs...)
}

func familyOf(a netip.Addr) v1.IPFamily {
	if a.Is4() {
		return v1.IPv4Protocol
	}
	return v1.IPv6Protocol
}
