package iptables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/proxier"
)

// tool runs the programs of one variant for one IP family in one network namespace. It is
// stateless; several goroutines may use it.
type tool struct {
	config   toolConfig
	variant  Variant // never VariantDetect
	programs programs
}

// programs are the paths of one variant's programs for one IP family.
type programs struct {
	restore, save string
	version       toolVersion
}

// openTool finds the programs, and checks that they and the kernel support what the engine
// needs; otherwise it returns a *proxier.UnsupportedError. Then the tables nat and filter
// exist.
func openTool(ctx context.Context, c toolConfig) (t *tool, err error) {
	c.log = cmp.Or(c.log, zap.NewNop())
	c.names.prefix = cmp.Or(c.names.prefix, proxier.DefaultNames().ChainPrefix)
	if c.variant == VariantDetect {
		t, err = c.detect(ctx)
	} else {
		t, err = c.find(ctx, c.variant)
	}
	if err != nil {
		return nil, err
	}
	if err := t.checkVersion(); err != nil {
		return nil, err
	}
	if err := t.checkFeatures(ctx); err != nil {
		return nil, err
	}
	c.log.Info("found the programs", zap.String("variant", string(t.variant)),
		zap.String("program", t.programs.restore), zap.Stringer("version", t.programs.version))
	return t, nil
}

// watcher returns the watcher of the variant.
func (t *tool) watcher(owned func(chain string) bool) (watcher, error) {
	if t.variant == VariantLegacy {
		return newLegacyWatcher(t.config, owned)
	}
	return newNFTWatcher(t.config, owned)
}

// save returns the output of the save program for one table, nothing if the table does not
// exist. It creates no table: iptables-legacy-save would, so it only runs for tables that
// the kernel lists.
func (t *tool) save(ctx context.Context, table string) ([]byte, error) {
	if t.variant == VariantLegacy {
		if exists, err := legacyTableExists(t.config.family, t.config.netNS, table); err != nil || !exists {
			return nil, err
		}
	}
	o, err := t.config.run(ctx, 0, nil, t.programs.save, "-t", table)
	if err != nil {
		return nil, err
	}
	if o.err != nil {
		return nil, o.explain(o.plain())
	}
	if bytes.Contains(o.output[:min(len(o.output), maxStderr)], []byte(incompatible)) {
		return nil, fmt.Errorf("save table %s: %w", table, errIncompatible)
	}
	return o.output, nil
}

// errIncompatible means that a table of the nft variant has rules that iptables cannot
// represent. iptables-nft-save prints incompatible, and succeeds.
var errIncompatible = errors.New("the table holds rules that iptables cannot print: change them with nft")

const incompatible = "is incompatible, use 'nft' tool"

// restore loads the rules in input; chains that input does not name stay as they are. Each
// table is loaded completely or not at all; tables before a failed one stay loaded. After
// the end of ctx or a timeout the state is unknown.
//
// Errors are a *restoreError, errLocked, proxier.ErrPermission, or the end of ctx. Only the
// legacy variant has a lock; it takes it for each table.
func (t *tool) restore(ctx context.Context, input []byte) error {
	c := t.config
	seconds := max(1, int((c.lockWait+time.Second-1)/time.Second))
	o, err := c.run(ctx, time.Duration(seconds)*time.Second, input,
		t.programs.restore, "--noflush", "-w", strconv.Itoa(seconds))
	if err != nil || o.err == nil {
		return err
	}
	return o.explain(newRestoreError(o.stderr, o.err))
}

// restoreError is a refusal by the restore program.
type restoreError struct {
	// Lines are the lines that the program named, counted from 1, without repetitions.
	// The line of COMMIT stands for the whole table: the legacy variant names it if the
	// kernel refuses a rule, the nft variant for a jump to a missing chain.
	Lines []int
	Text  string // stderr of the program, at most maxStderr bytes
	Err   error  // an *exec.ExitError
}

func (e *restoreError) Error() string { return fmt.Sprintf("restore: %s: %v", e.Text, e.Err) }
func (e *restoreError) Unwrap() error { return e.Err }

// linePattern matches "line 7 failed", "at line: 7" and "line 7: RULE_APPEND failed".
var linePattern = regexp.MustCompile(`\bline:? ([0-9]+)\b`)

func newRestoreError(stderr string, err error) *restoreError {
	e := &restoreError{Text: stderr, Err: err}
	for _, match := range linePattern.FindAllStringSubmatch(stderr, -1) {
		line, err := strconv.Atoi(match[1])
		if err == nil && !slices.Contains(e.Lines, line) {
			e.Lines = append(e.Lines, line)
		}
	}
	return e
}
