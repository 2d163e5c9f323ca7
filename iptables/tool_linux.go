package iptables

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/namespace"
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
	c.log.Info("programs of iptables are found", zap.String("variant", string(t.variant)),
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

// toolConfig configures which programs run, where and for how long.
type toolConfig struct {
	family  v1.IPFamily
	netNS   string // as in namespace.Visit
	names   chainNames
	variant Variant // VariantDetect: see detect
	// lockWait is how long restore waits for the lock of the legacy variant. It is
	// rounded up to seconds, at least one.
	lockWait time.Duration
	timeout  time.Duration // of each run of a program, without lockWait
	log      *zap.Logger   // nil logs nothing
	counting bool          // watchers read the counters of rules
	// dir is the directory of the programs, for tests; "" means PATH.
	dir string
	// lockFile is the lock of the legacy variant, for tests; "" means the default, which
	// all network namespaces share.
	lockFile string
	// waitDelay is shorter in tests; 0 means the default.
	waitDelay time.Duration
}

// errLocked means that a program of the legacy variant did not get the lock.
var errLocked = errors.New("another process holds the xtables lock")

// outcome is the result of a program.
type outcome struct {
	program string
	output  []byte
	stderr  string // at most maxStderr bytes
	took    time.Duration
	err     error // nil if it succeeded
}

// explain returns the errors that have a type or a hint, or else other. It reads stderr,
// because exit code 4 means the lock, a missing privilege, or a refused rule.
func (o outcome) explain(other error) error {
	has := func(text string) bool { return strings.Contains(o.stderr, text) }
	switch {
	case has("holding the xtables lock"):
		return fmt.Errorf("%w: %s gave up after %v", errLocked, o.name(), o.took.Round(time.Millisecond))
	case has("lock file") && has("ermission denied"):
		return fmt.Errorf("%w: %w: %s", proxier.ErrPermission, o.plain(), lockHint)
	case has("lock file"):
		return fmt.Errorf("%w: %s", o.plain(), lockHint)
	case has("ermission denied"), has("must be root"), has("peration not permitted"):
		return fmt.Errorf("%w: %w: run with CAP_NET_ADMIN in the network namespace", proxier.ErrPermission, o.plain())
	default:
		return other
	}
}

// lockHint says what to do if programs of the legacy variant cannot lock.
const lockHint = "let the process open and lock this file"

// plain returns the error with stderr.
func (o outcome) plain() error {
	if o.stderr == "" {
		return fmt.Errorf("run %s: %w", o.name(), o.err)
	}
	return fmt.Errorf("run %s: %s: %w", o.name(), o.stderr, o.err)
}

func (o outcome) name() string { return filepath.Base(o.program) }

const (
	// maxStderr is how much of a program's stderr is kept.
	maxStderr = 16 << 10
	// waitDelay is how long a program's output may stay open after it ended: a descendant
	// that left its process group can hold it. So can a child of this process between fork and
	// exec, for seconds on a busy machine.
	waitDelay = 10 * time.Second
)

// run runs a program in the network namespace and waits until it ends, at most for
// timeout plus wait. Then it kills the rest of its process group. An error means that the
// program did not start or did not end in time, or that its output is not complete; its own
// result is in the outcome.
func (c toolConfig) run(ctx context.Context, wait time.Duration, input []byte, argv ...string) (outcome, error) {
	limited, cancel := context.WithTimeout(ctx, c.timeout+wait)
	defer cancel()
	var output bytes.Buffer
	stderr := head{limit: maxStderr}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &output, &stderr
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if c.lockFile != "" {
		cmd.Env = append(cmd.Env, "XTABLES_LOCKFILE="+c.lockFile)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = cmp.Or(c.waitDelay, waitDelay)
	o := outcome{program: argv[0]}
	if err := ctx.Err(); err != nil {
		return o, fmt.Errorf("run %s: %w", o.name(), err)
	}
	began := time.Now()
	if err := namespace.Visit(c.netNS, cmd.Start); err != nil {
		return o, fmt.Errorf("start %s: %w", o.name(), err)
	}
	o.err = await(limited, cmd)
	o.took, o.output, o.stderr = time.Since(began), output.Bytes(), strings.TrimSpace(string(stderr.kept))
	if err := limited.Err(); err != nil && o.err != nil {
		return o, fmt.Errorf("run %s: killed after %v: %w", o.name(), o.took.Round(time.Millisecond), err)
	}
	if _, its := errors.AsType[*exec.ExitError](o.err); o.err != nil && !its {
		return o, fmt.Errorf("run %s: %w", o.name(), o.err)
	}
	return o, nil
}

// await waits until a program ends, kills it when ctx ends, and kills the rest of its
// process group. The program is reaped last, so that the kernel cannot give the group's
// number to another process before.
func await(ctx context.Context, cmd *exec.Cmd) error {
	pid := cmd.Process.Pid
	kill := func() { _ = unix.Kill(-pid, unix.SIGKILL) } // fails only if the group has ended
	killed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(killed)
		kill()
	})
	err := error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		err = unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
	if !stop() {
		<-killed
	}
	kill()
	return errors.Join(err, cmd.Wait())
}

// head is a Writer that keeps the first bytes.
type head struct {
	kept  []byte
	limit int
}

func (h *head) Write(b []byte) (int, error) {
	h.kept = append(h.kept, b[:min(len(b), h.limit-len(h.kept))]...)
	return len(b), nil
}
