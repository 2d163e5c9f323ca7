package canary

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// Canary tests the data plane of one Provider. Its methods may be called from several
// goroutines at once.
type Canary struct {
	options Options
	log     *zap.Logger
	network network

	started atomic.Bool

	mu       sync.Mutex // guards all below
	families map[v1.IPFamily]TestStatus
}

// New returns a Canary. It starts nothing. The error names every invalid option.
func New(options Options) (*Canary, error) {
	if err := options.Validate(); err != nil {
		return nil, fmt.Errorf("canary: %w", err)
	}
	options = options.withDefaults()
	return &Canary{
		options: options, log: options.Logger, network: sockets{options.NetNS},
		families: map[v1.IPFamily]TestStatus{},
	}, nil
}

// Run tests every IP family that the provider serves and that has a VIP, until ctx ends. It
// returns nil after all of its goroutines have ended, and after the provider got the events
// that remove its Services. Nothing happens before the provider's first sync, which therefore
// takes no longer. Run may be called once.
func (c *Canary) Run(ctx context.Context, provider proxier.Provider) error {
	if c.started.Swap(true) {
		return errors.New("canary: Run was called twice")
	}
	served := provider.Status().Families
	var testing sync.WaitGroup
	for _, vip := range c.options.VIPs {
		name := familyOf(vip)
		if _, ok := served[name]; !ok {
			continue
		}
		f := &family{Canary: c, name: name, provider: provider, vip: netip.AddrPortFrom(vip, servicePort)}
		f.update(func(s *TestStatus) { s.VIP, s.Since = f.vip, time.Now() })
		testing.Go(func() { f.run(ctx) })
	}
	testing.Wait()
	return nil
}

// family tests one IP family. Its goroutine owns all fields.
type family struct {
	*Canary
	name     v1.IPFamily
	provider proxier.Provider
	vip      netip.AddrPort
	endpoint *endpoint // nil: none
	// why is what Options.Explain said about the current failure, at the time explained.
	why       string
	explained time.Time
}

func (f *family) run(ctx context.Context) {
	defer f.withdraw()
	for f.pause(ctx) {
		if !f.provider.Status().Families[f.name].Synced {
			continue
		}
		isNew, err := f.prepare(ctx)
		switch {
		case err != nil:
			f.untested(err)
		case isNew: // the next test finds it programmed
		default:
			began := time.Now()
			err := f.test(ctx)
			if ctx.Err() == nil {
				f.record(err, time.Since(began))
			}
		}
	}
}

// pause waits for the next test. It returns false when ctx ends.
func (f *family) pause(ctx context.Context) bool {
	wait := f.options.Interval
	if s := f.Status()[f.name]; s.LastSuccess.IsZero() || !s.failingSince.IsZero() {
		const sooner = 4
		wait /= sooner
	}
	const spread = 0.1
	return pause.For(ctx, time.Duration(float64(wait)*(1-spread+2*spread*rand.Float64()))) //nolint:gosec // no secret
}

// prepare listens on an address of the node, and gives the Service and its EndpointSlice to
// the provider, if either differs from before.
func (f *family) prepare(ctx context.Context) (isNew bool, err error) {
	address, err := f.network.source(ctx, f.vip.Addr())
	if err != nil {
		return false, err
	}
	if f.endpoint != nil && f.endpoint.address.Addr() == address {
		return false, nil
	}
	next, err := listen(ctx, f.network, address)
	if err != nil {
		return false, fmt.Errorf("listen on %v: %w", address, err)
	}
	before := f.endpoint
	f.endpoint = next
	if before == nil {
		f.provider.OnServiceAdd(serviceOf(f.vip))
		f.provider.OnEndpointSliceAdd(sliceOf(f.vip, next.address))
	} else {
		f.provider.OnEndpointSliceUpdate(sliceOf(f.vip, before.address), sliceOf(f.vip, next.address))
		before.close()
	}
	f.update(func(s *TestStatus) { s.Endpoint = next.address })
	return true, nil
}

func (f *family) withdraw() {
	if f.endpoint == nil {
		return
	}
	f.provider.OnServiceDelete(serviceOf(f.vip))
	f.provider.OnEndpointSliceDelete(sliceOf(f.vip, f.endpoint.address))
	f.endpoint.close()
}

func (f *family) update(change func(*TestStatus)) (before, after TestStatus) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before = f.families[f.name]
	after = before
	change(&after)
	if after.State != before.State {
		after.Since = time.Now()
	}
	f.families[f.name] = after
	return before, after
}

// record takes over the result of a test, and logs a change of state.
func (f *family) record(err error, took time.Duration) {
	now := time.Now()
	before, after := f.update(func(s *TestStatus) {
		if err == nil {
			s.State, s.LastSuccess, s.Took, s.failingSince = StatePassing, now, took, time.Time{}
			s.Passed++
			return
		}
		s.Failed++
		s.LastFailure, s.Failure = now, err.Error()
		if s.failingSince.IsZero() {
			s.failingSince = now
		}
		if now.Sub(s.failingSince) >= f.options.Threshold {
			s.State = StateFailing
		}
	})
	f.logChange(&before, &after)
}

// untested records that there can be no test.
func (f *family) untested(err error) {
	before, after := f.update(func(s *TestStatus) {
		s.State, s.Failure, s.failingSince = StateUntested, err.Error(), time.Time{}
	})
	f.logChange(&before, &after)
}

func (f *family) logChange(before, after *TestStatus) {
	if before.State == after.State {
		return
	}
	fields := []zap.Field{
		zap.String("family", string(f.name)), zap.Stringer("vip", after.VIP), zap.Stringer("before", before.State),
	}
	if after.Endpoint.IsValid() { // there was one
		fields = append(fields, zap.Stringer("endpoint", after.Endpoint))
	}
	switch after.State {
	case StateFailing:
		f.log.Warn("canary fails: connections to Services of this node may fail too", append(fields, zap.String("reason", after.Failure))...)
	case StateUntested:
		f.log.Info("canary cannot test the data plane", append(fields, zap.String("reason", after.Failure))...)
	case StatePassing:
		f.log.Info("canary passes: connections go through the rules", append(fields, zap.Duration("took", after.Took))...)
	case StateWaiting:
	}
}
