package nodeproxy

import (
	"context"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/node/packettrace"
	"github.com/serviceplane/serviceplane/proxier"
)

// The values of --canary.
const (
	canaryReports = "report"
	canaryDecides = "healthz"
	canaryOff     = "off"
)

// canaryFlags are the flags of the test of the data plane.
type canaryFlags struct {
	mode     string
	vips     []string
	interval time.Duration
}

func (c *canaryFlags) register(f *pflag.FlagSet) {
	f.StringVar(&c.mode, "canary", canaryReports, "test the data plane with connections through the rules: report tells failures in /healthz, metrics and log; healthz also answers 503 at /healthz; off does not test")
	f.StringSliceVar(&c.vips, "canary-vips", nil, "reserved VIPs of the test, at most one of each IP family; default is 192.0.0.7 and 100::7, and with --instance none")
	f.DurationVar(&c.interval, "canary-interval", 10*time.Second, "mean time between tests of an IP family; one that fails for three of them is reported")
}

func (c *canaryFlags) validate(f *faults) {
	f.check(c.mode == canaryReports || c.mode == canaryDecides || c.mode == canaryOff, "canary", c.mode, "report, healthz or off")
	vips, ok := c.addresses()
	f.check(ok && canary.Options{VIPs: vips}.Validate() == nil, "canary-vips", strings.Join(c.vips, ","), "IP addresses that nothing else uses, at most one of each IP family")
	f.check(c.interval >= 100*time.Millisecond, "canary-interval", c.interval, "100ms or more")
}

func (c *canaryFlags) addresses() ([]netip.Addr, bool) {
	return parseAll(c.vips, changetracker.ParseAddr)
}

// unhealthy are the conditions for 503 at /healthz.
func (c *canaryFlags) unhealthy() []string {
	if c.mode != canaryDecides {
		return nil
	}
	return []string{canary.ConditionCanary}
}

// testedProxy is a proxy with a canary, whose conditions are in the Status.
type testedProxy struct {
	*proxier.Proxier

	canary *canary.Canary // nil: none
}

// tested returns the proxy with its canary. Several instances on a node would meet at the
// default VIPs.
func (o *options) tested(p *proxier.Proxier, log *zap.Logger) (*testedProxy, error) {
	if o.canary.mode == canaryOff || o.instance != "" && len(o.canary.vips) == 0 {
		return &testedProxy{Proxier: p}, nil
	}
	vips, _ := o.canary.addresses() // nil means the default
	const tolerated = 3             // intervals
	c, err := canary.New(canary.Options{VIPs: vips, Interval: o.canary.interval, Threshold: tolerated * o.canary.interval, Logger: log, Explain: packettrace.ExplainTest("")})
	return &testedProxy{p, c}, err
}

// Status returns the proxy's, with the conditions of the canary.
func (p *testedProxy) Status() proxier.Status {
	if p.canary == nil {
		return p.Proxier.Status()
	}
	return p.canary.Extend(p.Proxier.Status)()
}

func (p *testedProxy) runCanary(ctx context.Context) error {
	if p.canary == nil {
		return nil
	}
	return p.canary.Run(ctx, p.Proxier)
}
