package ebpf

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/proxier"
)

// retry attaches the programs to cgroups that have come. An error means that only a full sync helps.
func (e *Engine) retry() error {
	e.forward.retry()
	e.mu.Lock()
	defer e.mu.Unlock()
	defer e.noteFaults()
	return e.followCgroups()
}

// triesAgain reports whether sockets may be translated now. What check does not find is tried, after pauses
// that double up to an hour.
func (e *Engine) triesAgain(now time.Time) bool {
	if e.closedPrograms().check() != nil {
		e.lacking = true
		return false
	}
	if !e.lacking && now.Before(e.tryAt) {
		return false
	}
	e.lacking, e.tryPause = false, min(2*e.tryPause, longestTryPause)
	e.tryAt = now.Add(e.tryPause)
	return true
}

const longestTryPause = time.Hour

var errFullSync = errors.New("a full sync opens the maps")

// followCgroups attaches the programs to the cgroups that exist now.
func (e *Engine) followCgroups() error {
	if e.without != nil && e.triesAgain(time.Now()) {
		return errFullSync
	}
	before := e.cgroups
	if e.cgroups, e.missing = e.config.Sockets.findCgroups(); slices.Equal(before, e.cgroups) {
		return nil
	}
	e.log.Info("cgroups have come or gone: programs are attached to those that are there", zap.Strings("before", before), zap.Strings("now", e.cgroups))
	if !e.translates() || e.layer.services == nil {
		return errFullSync
	}
	return e.layer.activate(e.layer.kernel)
}

// watchPause is how often the links are compared: the kernel does not report their changes.
const watchPause = 10 * time.Second

// Watch is for Abilities. Damage of the rules is reported at once, that of links and pins
// within ten seconds. Maps are compared by full syncs.
func (e *Engine) Watch(ctx context.Context, damaged func(proxier.Damage)) error {
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	running.Go(func() { e.forward.watch(ctx) })
	running.Go(func() { e.datagrams.watch(ctx) })
	running.Go(func() {
		ticker := time.NewTicker(e.watch)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				failed := e.retry() != nil // before the links are looked at: a cgroup that has gone is no damage
				if object := cmp.Or(e.damagedObject(), e.forward.damaged()); failed || object != "" {
					damaged(proxier.Damage{Object: object})
				}
			}
		}
	})
	return e.rules.Abilities().Watch(ctx, damaged)
}

func (e *Engine) damagedObject() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.programs == nil {
		return ""
	}
	return e.programs.damaged()
}
