package nftables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/proxier"
)

// While a listener pauses, other programs may change the table unnoticed. A check finds out: it compares the table
// with what the engine knows of it. Updates wait for no more than a short question of a check. Only a difference leads to a full update.

const (
	// checkAttempts is how often a check reads the table, because the engine writes what the check cannot tell from damage:
	// chains, globals, or as much as a load. The pause before it is doubled each time.
	checkAttempts = 6
	checkPause    = 50 * time.Millisecond
	// pausePerCheck times the duration of a check is the pause after it, so that a tenth of the time is spent; longestRest is
	// the longest pause, because a check that was disturbed has paused itself.
	pausePerCheck = 9
	longestRest   = 10 * time.Second
)

// known is what an engine knows of its table when a check begins.
type known struct {
	globals desired.Globals
	layout  layout
	placed  map[changetracker.ServicePortName]*placed
	classes []class // with those that nobody uses now
	*record
}

// record has the elements that the engine has written since. It is disturbed when the engine has written more. The mu of the
// engine guards written until the next record begins.
type record struct {
	written   map[elementKey]bool
	disturbed atomic.Bool
}

// elementKey names an element of a set.
type elementKey struct {
	in  setID
	key elementBytes
}

func newRecord() *record { return &record{written: map[elementKey]bool{}} }

// beginCheck returns what the engine knows. From now on, it records what it writes: a check may read such an element before
// or after that. The listeners hear of later changes by others. ok is false if the next update is full.
func (e *Engine) beginCheck() (k known, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted {
		return known{}, false
	}
	e.step.record = newRecord()
	return known{e.state.globals, e.state.layout, maps.Clone(e.state.placed), e.state.classes.sorted(), e.step.record}, true
}

// nextRecord ends a record, and begins another one unless it is nil. It reports whether the last one is complete.
func (e *Engine) nextRecord(last, next *record) (complete bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.step.record != last {
		return false
	}
	e.step.record = next
	return e.trusted
}

func (e *Engine) disturbCheck() {
	if e.step.record != nil {
		e.step.record.disturbed.Store(true)
		e.step.record = nil
	}
}

// check returns the differences between the table and what the engine knows, one without content if that cannot be found
// out beside the engine's writes. It returns none if a full update has begun meanwhile, which repairs them. The socket is of
// checks only, and stays open: when a socket is closed, the kernel lets all writers wait until it has freed what is deleted
// (nft_rcv_nl_event).
func (e *Engine) check(ctx context.Context, k kernel) (found []proxier.Difference, err error) {
	for attempt := range checkAttempts {
		if attempt > 0 && !pause.For(ctx, checkPause<<attempt) {
			return nil, ctx.Err()
		}
		var complete bool
		if found, complete, err = e.checkOnce(ctx, k); complete {
			return found, nil
		}
	}
	return []proxier.Difference{{}}, err
}

func (e *Engine) checkOnce(ctx context.Context, by kernel) (found []proxier.Difference, complete bool, err error) {
	reader, err := e.scratch()
	if err != nil {
		return nil, false, err
	}
	reader.kernel = by
	k, ok := e.beginCheck()
	if !ok {
		return nil, true, nil
	}
	reader.begin(k.layout, false)
	for _, c := range k.classes {
		reader.state.classes.adopt(c)
	}
	v := reader.verification(&desired.Update{Globals: k.globals})
	v.record = k.record
	err = v.read(ctx, reader)
	full, since := e.fullUpdates.Load(), newRecord()
	defer e.nextRecord(since, nil)
	if !e.nextRecord(k.record, since) || err != nil { // another program may have changed the table at this moment
		return nil, false, err
	}
	v.absent = map[elementKey]absent{}
	if _, err = v.compareAll(maps.All(k.placed)); err == nil && len(v.report.Differences) == 0 {
		err = e.askForAbsent(ctx, v, by, since)
	}
	switch {
	case errors.Is(err, errDisturbed):
		return nil, false, nil
	case err != nil || e.fullUpdates.Load() != full:
		return nil, err == nil, err
	}
	return v.report.Differences, true, nil
}

// askForAbsent asks for the elements that a reading lacks, until one of them is a difference: a dump counts the elements that
// it has sent, and when one of them goes, it skips another one.
func (e *Engine) askForAbsent(ctx context.Context, v *verification, by kernel, since *record) error {
	bySet := map[setID][]elementBytes{}
	for a := range v.absent {
		bySet[a.in] = append(bySet[a.in], a.key)
	}
	for _, in := range slices.Sorted(maps.Keys(bySet)) {
		keys := bySet[in]
		slices.SortFunc(keys, func(a, b elementBytes) int { return bytes.Compare(a.bytes(), b.bytes()) })
		q := questioner{asked: &asked{spec: &setSpecs[in], found: map[string]string{}}, kernel: by, wire: newWire(e.batch.Family, e.batch.Table), perMessage: 1}
		for some := range slices.Chunk(keys, askMessage) {
			if err := e.askForSome(ctx, v, &q, some, since); err != nil || len(v.report.Differences) > 0 {
				return err
			}
		}
	}
	return nil
}

// errDisturbed means that the engine has written what a check does not know.
var errDisturbed = errors.New("the check is disturbed")

// askForSome does so while the engine does not write.
func (e *Engine) askForSome(ctx context.Context, v *verification, q *questioner, keys []elementBytes, since *record) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.trusted || e.step.record != since {
		return errDisturbed
	}
	for q.due = slices.Clone(keys); len(q.due) > 0; {
		if err := q.ask(ctx); err != nil {
			return err
		}
	}
	for _, key := range keys {
		if a := (elementKey{q.spec.id, key}); !since.written[a] {
			v.decide(v.absent[a], q.spec, q.found)
		}
	}
	return nil
}

// answer checks the table for each doubt of a listener. What the listener has reported meanwhile leads to a full update, which
// repairs all that a check finds.
func (e *Engine) answer(ctx context.Context, l *listener) {
	var k kernel
	defer func() {
		if k != nil {
			_ = k.Close()
		}
	}()
	for {
		select {
		case <-l.doubts:
		case <-ctx.Done():
			return
		}
		began, reports := time.Now(), l.reports.Load()
		found, err := e.checkWith(ctx, &k)
		if err != nil && ctx.Err() == nil {
			found = []proxier.Difference{{}}
		}
		if len(found) > 0 && l.reports.Load() == reports {
			first := slices.MinFunc(found, func(a, b proxier.Difference) int { return cmp.Compare(a.Object, b.Object) })
			l.damaged(proxier.Damage{Object: first.Object})
		}
		if !pause.For(ctx, min(pausePerCheck*time.Since(began), longestRest)) {
			return
		}
	}
}

// checkWith is check. It opens the socket if it is nil, and closes it if its next answers may be those to this check.
func (e *Engine) checkWith(ctx context.Context, k *kernel) (found []proxier.Difference, err error) {
	if *k == nil {
		opened, err := e.open()
		if err != nil {
			return nil, err
		}
		*k = opened
		_, _ = e.generationFrom(ctx, *k) // see listFlowtables; if this fails, so does the check
	}
	if found, err = e.check(ctx, *k); err != nil {
		err = errors.Join(err, (*k).Close())
		*k = nil
	}
	return found, err
}
