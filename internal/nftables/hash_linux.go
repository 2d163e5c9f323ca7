package nftables

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/nft"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// The values of Engine.hash: whether the kernel has the expression for consistent hashes.
const (
	hashUnknown uint32 = iota
	hashThere
	hashMissing
)

const (
	featureProbes = 3
	featurePause  = 100 * time.Millisecond
)

// findHash finds out whether the kernel has consistent hashes, before the first service port
// gets one: a rule with an unknown expression would fail the whole transaction. A full update
// asks again for what was missing: its module may have been loaded.
func (e *Engine) findHash(ctx context.Context, update *desired.Update) error {
	known := e.hash.Load()
	if e.holds != nil || known == hashThere || known == hashMissing && !update.Full || !anyService(update, asksForHash) {
		return nil
	}
	l := e.layoutFor(&update.Globals)
	f := feature{
		name: "consistent hashes", option: "CONFIG_NFT_HASH", exprs: l.rules.index(forwardingClass(treatment{}, bySourcePort, 1), 0),
	}
	return e.findFeature(ctx, &e.hash, f, "kernel has no consistent hashes: endpoints are chosen at random")
}

// findFeature finds out whether the kernel has a feature, and logs it once if not.
func (e *Engine) findFeature(ctx context.Context, known *atomic.Uint32, f feature, without string) error {
	before := known.Load()
	err := e.probeUnlessLoading(ctx, f, before == hashMissing)
	switch {
	case err == nil:
		known.Store(hashThere)
	case !isUnknown(err):
		return fmt.Errorf("probe nf_tables for %s: %w", f.name, err)
	case before == hashUnknown:
		e.log.Warn(without, zap.Error(f.missing(err)))
		known.Store(hashMissing)
	}
	return nil
}

// probeUnlessLoading waits a while for a module that may be loading for the other family, unless
// the feature was missing before.
func (e *Engine) probeUnlessLoading(ctx context.Context, f feature, wasMissing bool) error {
	err := e.probe(ctx, f)
	for range featureProbes {
		if !isLoading(err) && (wasMissing || !isUnknown(err)) || !pause.For(ctx, featurePause) {
			break
		}
		err = e.probe(ctx, f)
	}
	return err
}

// isLoading reports whether the kernel refused a transaction as a whole, because it loads nf_tables.
func isLoading(err error) bool {
	var refused *nft.Error
	return errors.As(err, &refused) && strings.HasPrefix(refused.Object, "transaction") && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP))
}

func asksForHash(s *desired.Service) bool { return (desired.Traits{}).Balancing(s).Hashes() }

// isUnknown reports whether the kernel refused a rule because it does not know an expression, or
// a set or chain of the rule is not there, or a flowtable.
func isUnknown(err error) bool {
	object := refusedObject(err)
	return (strings.HasPrefix(object, "rule ") || strings.HasPrefix(object, "flowtable ")) && (errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP))
}

// refusedObject is what the kernel refused to write, "" if the error says nothing of it.
func refusedObject(err error) string {
	if refused, is := errors.AsType[*nft.Error](err); is {
		return refused.Object
	}
	return ""
}

// explainRule adds the missing features to an error about a rule: classes come after the
// scaffold, so the kernel may lack what only they need.
func (e *Engine) explainRule(ctx context.Context, err error) error {
	if !isUnknown(err) || errors.Is(err, proxier.ErrNotSupported) {
		return err
	}
	if opening := e.connect(); opening != nil {
		return errors.Join(err, opening)
	}
	return errors.Join(e.explain(ctx, err, e.features()), e.disconnect())
}
