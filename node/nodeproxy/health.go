package nodeproxy

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/conntrack"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/node/leastconnections"
	"github.com/serviceplane/serviceplane/proxier"
)

// healthAnnotation chooses the health check of all ports of a Service. With a dot and the name of
// a port, it is for that port alone.
const healthAnnotation = "serviceplane.io/health-check"

// The kinds of health checks.
const (
	byTCP         = "tcp"
	byHTTP        = "http"
	byConnections = "connections"
)

// leastInterval is that of checks which an annotation asks for: who may write it is not who pays for it.
const leastInterval = time.Second

const healthForm = "off, or tcp, http or connections, followed by settings such as interval=5s"

// healthFlags are the flags of health checks beyond readiness.
type healthFlags struct {
	enabled    bool
	byDefault  string
	maxEjected int
}

func (h *healthFlags) register(f *pflag.FlagSet) {
	f.BoolVar(&h.enabled, "endpoint-health", false, "check endpoints beyond readiness, from this node, as the annotation "+healthAnnotation+" of their Service says, and give no connections to those that fail")
	f.StringVar(&h.byDefault, "endpoint-health-default", "off", "health check of Services without the annotation, for --endpoint-health: "+healthForm)
	f.IntVar(&h.maxEjected, "endpoint-health-max-ejected", 50, "how many percent of a Service's endpoints may fail their health check and get no connections; the last endpoint always stays") //nolint:mnd // a default
}

func (h *healthFlags) validate(f *faults) {
	_, _, err := h.parse(h.byDefault)
	f.check(err == nil, "endpoint-health-default", h.byDefault, healthForm)
	f.check(h.enabled || h.byDefault == "off", "endpoint-health-default", h.byDefault, "nothing without --endpoint-health")
	f.check(h.maxEjected >= 1 && h.maxEjected <= 100, "endpoint-health-max-ejected", h.maxEjected, "1 to 100")
}

// healthText is in the payload of a service port: what chose its check.
type healthText struct {
	text string
	own  bool // the text is for this port alone
}

// decorate is a changetracker.Options.DecorateService.
func (h *healthFlags) decorate(p *changetracker.ServicePort, s *v1.Service) {
	text, own := s.Annotations[healthAnnotation+"."+p.Name.Port]
	if !own {
		var all bool
		if text, all = s.Annotations[healthAnnotation]; !all {
			text = h.byDefault
		}
	}
	ext, _ := changetracker.Ext[payload](p.Ext)
	ext.health = healthText{text, own}
	p.Ext = ext
}

// choose is the Choose of endpointhealth.Options. What is for all ports of a Service does not
// apply to those that it cannot check, such as port dns, UDP, beside dns-tcp.
func (h *healthFlags) choose(p *changetracker.ServicePort) (policy endpointhealth.CheckPolicy, ok bool, err error) {
	ext, _ := changetracker.Ext[payload](p.Ext)
	chosen := ext.health
	policy, ok, err = h.parse(chosen.text)
	if err != nil {
		return policy, false, fmt.Errorf("annotation %s: %q: %w: want %s", healthAnnotation, readable(chosen.text), short(err), healthForm)
	}
	if ok && chosen.text != h.byDefault && policy.Probe != nil && policy.WithDefaults().Interval < leastInterval {
		return policy, false, fmt.Errorf("annotation %s: %q: interval=%v: want at least %v", healthAnnotation, readable(chosen.text), policy.Interval, leastInterval)
	}
	if !chosen.own && p.Name.Protocol != v1.ProtocolTCP && policy.Probe != nil && onPort(policy.Probe) == 0 {
		return policy, false, nil
	}
	return policy, ok, nil
}

// onPort is the port that a Probe names.
func onPort(probe endpointhealth.Probe) uint16 {
	switch p := probe.(type) {
	case endpointhealth.TCPProbe:
		return p.Port
	case endpointhealth.HTTPProbe:
		return p.Port
	default:
		return 0
	}
}

// parse reads a health check: its kind, and settings. ok is false for off.
func (h *healthFlags) parse(text string) (policy endpointhealth.CheckPolicy, ok bool, err error) {
	words := strings.Fields(text)
	if len(words) == 0 {
		return policy, false, errors.New("it is empty")
	}
	policy.MaxEjected = float64(h.maxEjected) / 100 //nolint:mnd // percent
	kind := words[0]
	if kind != byConnections {
		policy.PassiveFailures = -1
	}
	var page endpointhealth.HTTPProbe
	switch known := settings(kind, &policy, &page); kind {
	case "off":
		if len(words) > 1 {
			return policy, false, errors.New("off has no settings")
		}
		return policy, false, nil
	case byTCP, byHTTP, byConnections:
		for _, word := range words[1:] {
			name, value, _ := strings.Cut(word, "=")
			set, ok := known[name]
			if !ok {
				return policy, false, fmt.Errorf("%s: %s has no such setting", word, kind)
			}
			if err := set(value); err != nil {
				return policy, false, fmt.Errorf("%s: %w", word, err)
			}
		}
	default:
		return policy, false, fmt.Errorf("%s is no kind of check", kind)
	}
	switch kind {
	case byTCP:
		policy.Probe = endpointhealth.TCPProbe{Port: page.Port}
	case byHTTP:
		policy.Probe = page
	}
	return policy, true, policy.Validate()
}

// settings are what a kind of check has, by name.
func settings(kind string, policy *endpointhealth.CheckPolicy, page *endpointhealth.HTTPProbe) map[string]func(value string) error {
	all := map[string]func(string) error{
		"connections": number(&policy.PassiveFailures, math.MaxInt16),
		"eject-for":   duration(&policy.EjectFor), "slow-start": duration(&policy.SlowStart),
	}
	if kind == byConnections {
		return all
	}
	all["port"] = func(value string) error {
		port, err := strconv.ParseUint(value, 10, 16)
		if err != nil || port == 0 {
			return errors.New("want a port from 1 to 65535")
		}
		page.Port = uint16(port)
		return nil
	}
	all["interval"], all["timeout"] = duration(&policy.Interval), duration(&policy.Timeout)
	all["failures"], all["successes"] = number(&policy.Failures, math.MaxInt16), number(&policy.Successes, math.MaxInt16)
	if kind == byHTTP {
		const highest = 599
		all["path"], all["host"], all["status"] = text(&page.Path, "/"), text(&page.Host, ""), number(&page.Status, highest)
	}
	return all
}

func text(to *string, prefix string) func(string) error {
	return func(value string) error {
		if *to = value; value == "" || !strings.HasPrefix(value, prefix) {
			return fmt.Errorf("want a value that begins with %q", prefix)
		}
		return nil
	}
}

func number(to *int, most int) func(string) error {
	return func(value string) (err error) {
		if *to, err = strconv.Atoi(value); err != nil || *to < 1 || *to > most {
			return fmt.Errorf("want a number from 1 to %d", most)
		}
		return nil
	}
}

func duration(to *time.Duration) func(string) error {
	return func(value string) (err error) {
		if *to, err = time.ParseDuration(value); err != nil || *to <= 0 {
			return errors.New("want a duration such as 5s")
		}
		return nil
	}
}

// observed is the Observer of a proxy, which adds traces and health checks to the metrics, and what else changes
// endpoints by what it observes.
type observed struct {
	proxier.Observer

	balancer *leastconnections.Balancer // nil: the engine has the policy

	health *endpointhealth.Checker // nil: none
	log    *zap.Logger
	// counting is closed when a Policy counts connections.
	counting chan struct{}
}

// observed returns what observes a proxy. end exports the last traces.
func (o *options) observed(ctx context.Context, node string, m *measured, log *zap.Logger) (all *observed, end func(), err error) {
	traced, end, err := o.traced(ctx, node, m.Metrics, log)
	if err != nil {
		return nil, nil, err
	}
	all = &observed{Observer: traced, log: log, counting: make(chan struct{})}
	if o.weighsConnections() {
		all.balancer, err = leastconnections.New(leastconnections.Options{List: conntrack.OpenConnections(""), Logger: log})
	}
	if err != nil {
		end()
		return nil, nil, err
	}
	if !o.health.enabled {
		return all, end, nil
	}
	var once sync.Once
	all.health, err = endpointhealth.New(endpointhealth.Options{Logger: log, Choose: func(p *changetracker.ServicePort) (endpointhealth.CheckPolicy, bool, error) {
		policy, ok, err := o.health.choose(p)
		if ok && policy.PassiveFailures >= 0 {
			once.Do(func() { close(all.counting) })
		}
		return policy, ok, err
	}})
	if err != nil {
		end()
		return nil, nil, err
	}
	all.Observer = all.health.Observer(traced)
	return all, end, nil
}

// weighsConnections reports whether the mode has no policy least-connections of its own.
func (o *options) weighsConnections() bool { return o.mode() != modeIPVS && o.mode() != modeUserspace }

// tasks are those of a proxy in a mode. In mode userspace, sockets report the connections for
// health checks; in others the kernel does, once a Service asks for it.
func (o *observed) tasks(p *proxier.Proxier, m mode) (all []task) {
	if o.balancer != nil {
		all = append(all, task{"least connections", func(ctx context.Context) error { return o.balancer.Run(ctx, p) }})
	}
	if o.health == nil {
		return all
	}
	all = append(all, task{"endpoint health", func(ctx context.Context) error { return o.health.Run(ctx, p) }})
	if m == modeUserspace {
		return all
	}
	return append(all, task{"connection reports", func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return nil
		case <-o.counting:
		}
		if err := conntrack.ReportConnections(ctx, "", o.health.Suspect); err != nil {
			o.log.Warn("failed connections do not count for the health of endpoints: connection tracking cannot be read", zap.Error(err))
		}
		return nil
	}})
}
