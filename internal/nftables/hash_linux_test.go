package nftables

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// lackingKernel is a kernel without an expression: it gets another name, which no kernel knows.
type lackingKernel struct {
	kernel
	expression string
	met        *int // rules with the expression
}

func (k *lackingKernel) Commit(ctx context.Context, w *nft.Batch) error {
	const isName = "\x01\x00" // NFTA_EXPR_NAME
	name := isName + k.expression + "\x00"
	*k.met += bytes.Count(w.Buf, []byte(name))
	copy(w.Buf, bytes.ReplaceAll(w.Buf, []byte(name), []byte(isName+strings.Repeat("x", len(k.expression))+"\x00")))
	return k.kernel.Commit(ctx, w)
}

// lack takes an expression from the kernel of an engine, and returns the count of its rules.
func (e *Engine) lack(expression string) *int {
	open, met := e.open, new(int)
	e.open = func() (kernel, error) {
		k, err := open()
		return &lackingKernel{k, expression, met}, err
	}
	return met
}

// TestAKernelWithoutHashes: a service port that asks for a consistent hash becomes random, is a
// Problem of its own and does not disturb others. The kernel is asked once, and again by a full
// sync.
func TestAKernelWithoutHashes(t *testing.T) {
	t.Parallel()
	c := newCluster(3, 4)
	p := startConfigured(t, c, netnstest.New(t), proxier.Config{
		Runner: runner.Options{MinInterval: runner.Unlimited, Retry: runner.Backoff{Initial: time.Hour, Max: time.Hour}},
		Tracker: changetracker.ObjectOptions{DecorateService: func(p *changetracker.ServicePort, s *v1.Service) {
			if s.Annotations["hash"] != "" {
				p.Balancing = changetracker.SourceHash
			}
		}},
	})
	t.Cleanup(p.stop)
	open := p.engine.open
	met := p.engine.lack("hash")
	p.load(t)
	if *met != 0 {
		t.Errorf("the kernel is asked %d times before any service port has a hash", *met)
	}
	for range 2 { // the second one changes the endpoints
		hashed := c.services[1].DeepCopy()
		hashed.Annotations = map[string]string{"hash": "yes"}
		p.OnServiceUpdate(c.services[1], hashed)
		c.services[1] = hashed
		c.slices[1] = newSlice(hashed.ObjectMeta, 100, 5)
		p.OnEndpointSliceUpdate(nil, c.slices[1])
		c.slices[2] = newSlice(c.services[2].ObjectMeta, 200, 5)
		p.OnEndpointSliceUpdate(nil, c.slices[2])
		p.sync(t)
		(&failing{programmed: p}).mustHold(t, map[string][]string{
			c.services[0].Spec.ClusterIP: addressesOf(c.slices[0]), hashed.Spec.ClusterIP: addressesOf(c.slices[1]), c.services[2].Spec.ClusterIP: addressesOf(c.slices[2]),
		})
		problems := p.Status().Problems
		if len(problems) != 1 || problems[0].Reason != changetracker.ReasonUnsupported || problems[0].Object != "Service bench/service-1" {
			t.Errorf("problems %v, want one of service-1", problems)
		}
		if *met != 1+featureProbes {
			t.Errorf("%d rules with hashes, want one probe and its %d repetitions", *met, featureProbes)
		}
	}
	// The module is loaded.
	p.engine.open = func() (kernel, error) { return nil, errInjected }
	if err := errors.Join(p.engine.Close(), p.Sync(t.Context())); !errors.Is(err, errInjected) {
		t.Fatalf("sync = %v, want %v", err, errInjected)
	}
	p.engine.open = open
	p.sync(t) // full, after the failed one
	if problems := p.Status().Problems; len(problems) != 0 || p.engine.Traits(nil).NoHash {
		t.Errorf("problems %v after the module was loaded", problems)
	}
}

// TestAKernelWithoutNumbers: without numgen there is no load balancing at all; the error of each
// sync names it.
func TestAKernelWithoutNumbers(t *testing.T) {
	t.Parallel()
	w := &world{rand: rand.New(rand.NewPCG(1, 0)), family: v1.IPv4Protocol}
	e := w.engine(t, netnstest.New(t))
	e.lack("numgen")
	m := model{}
	m.step(w, 10, 10)
	for range 2 {
		_, err := e.Apply(t.Context(), m.full(w))
		var lacks *proxier.UnsupportedError
		if !errors.As(err, &lacks) || !strings.Contains(lacks.Feature, "expression numgen") || !strings.Contains(lacks.Hint, "CONFIG_NFT_NUMGEN") {
			t.Errorf("apply = %v, want an UnsupportedError about numgen", err)
		}
		if n := strings.Count(err.Error(), "is missing"); n != 1 {
			t.Errorf("%d features named, want 1: %v", n, err)
		}
	}
}

// TestAKernelWithoutCounters: connections work and are not counted. Counts names what is missing.
// After the module was loaded, the next full sync turns counting on.
func TestAKernelWithoutCounters(t *testing.T) {
	t.Parallel()
	w := &world{rand: rand.New(rand.NewPCG(1, 0)), family: v1.IPv4Protocol}
	c, m := newCounted(t, w), w.udp(5)
	core, logs := observer.New(zap.WarnLevel)
	c.log = zap.New(core)
	open := c.open
	met := c.lack("counter")
	for range 2 {
		mustApply(t, c.Engine, m.full(w))
		_, err := c.Counts(t.Context())
		var lacks *proxier.UnsupportedError
		if !errors.As(err, &lacks) || !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(lacks.Hint, "CONFIG_NFT_COUNTER") {
			t.Errorf("counts = %v, want an UnsupportedError about counters", err)
		}
	}
	if want := 1 + featureProbes + 1; *met != want || logs.Len() != 1 {
		t.Errorf("%d rules with counters and %d warnings, want %d probes and one warning", *met, logs.Len(), want)
	}
	c.connectAtRandom(m, 20)
	clear(c.sent)
	netnstest.Check(t, c.Close())
	c.open = open
	mustApply(t, c.Engine, m.full(w))
	c.connectAtRandom(m, 20)
	c.check(m, "after the module was loaded")
}
