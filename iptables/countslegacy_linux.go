package iptables

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/pause"
)

// ended implements watcher.
func (w *legacyWatcher) ended() (e endings) {
	e.counters, e.flushed = w.endedCounters, w.flushed
	w.endedCounters, w.flushed = nil, nil
	return e
}

// counters implements watcher. A program of the legacy variant replaces the whole table by one
// whose counters are 0, and then adds what the old ones had. Who reads in between finds counters
// that have fallen, and reads again under the lock of these programs.
func (w *legacyWatcher) counters(ctx context.Context, last func(counterKey) uint64) (values counterValues, err error) {
	if values, err = w.tables.counters(w.owned); err != nil {
		return nil, err
	}
	for k, value := range values {
		if value >= last(k) {
			continue
		}
		err := w.lock(ctx, func() (err error) {
			values, err = w.tables.counters(w.owned)
			return err
		})
		return values, err
	}
	return values, nil
}

// during implements watcher. The rules of the chains that the write changes begin to count at 0:
// what they had is read just before.
func (w *legacyWatcher) during(chains map[chainID]bool, write func() error) error {
	if !w.counting {
		return write()
	}
	values, err := w.tables.counters(func(chain string) bool { return chains[chainID{tableNAT, chain}] && w.owned(chain) })
	if err != nil {
		return err
	}
	if err := write(); err != nil {
		return err
	}
	for k, value := range values {
		w.endedCounters = append(w.endedCounters, endedCounter{k, value})
	}
	if w.flushed == nil {
		w.flushed = map[string]bool{}
	}
	for id := range chains {
		if id.table == tableNAT {
			w.flushed[id.chain] = true // also where another program had deleted the rules
		}
	}
	return nil
}

// counters reads the counters of the rules that translate to an endpoint.
func (t *legacyTables) counters(owned func(chain string) bool) (counterValues, error) {
	info, blob, err := t.read(tableNAT)
	if err != nil || blob == nil {
		return nil, err
	}
	v6 := t.family == v1.IPv6Protocol
	layout := legacyOf(t.family).layout
	entries, begins, err := layout.parse(&info, blob)
	if err != nil {
		return nil, fmt.Errorf("parse legacy table %s: %w", tableNAT, err)
	}
	values := counterValues{}
	var chain string
	var isOurs bool
	for i := range entries {
		e := &entries[i]
		if name, ok := begins[e.at]; ok {
			chain, isOurs = name, owned(name)
		}
		if !isOurs || e.targetName() != dnatTarget {
			continue
		}
		endpoint, ok := endpointOf(uint32(e.action[targetRevision]), e.action[targetData:], v6)
		if !ok {
			continue
		}
		const length = 16 // of struct xt_counters: packets and bytes
		values[counterKey{chain, endpoint}] += binary.NativeEndian.Uint64(blob[e.at+layout.matches-length:])
	}
	return values, nil
}

const (
	// defaultLockFile is XT_LOCK_NAME of iptables.
	defaultLockFile = "/run/xtables.lock"
	// lockPeriod is how often a lock is tried that another process holds.
	lockPeriod = 10 * time.Millisecond
)

// lock runs f while no program of the legacy variant changes tables.
func (c toolConfig) lock(ctx context.Context, f func() error) (err error) {
	name := cmp.Or(c.lockFile, defaultLockFile)
	ctx, cancel := context.WithTimeout(ctx, c.lockWait)
	defer cancel()
	file, err := os.OpenFile(name, os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("open the xtables lock: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	for {
		switch err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return f()
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("take the xtables lock %s: %w", name, err)
		case !pause.For(ctx, lockPeriod):
			return fmt.Errorf("%w: %s", errLocked, name)
		}
	}
}
