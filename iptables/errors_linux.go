package iptables

import (
	"bytes"
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

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// errLocked says that a program of the legacy variant did not get its lock.
var errLocked = errors.New("another process holds the xtables lock")

// restoreError says what the restore program did not like.
type restoreError struct {
	// Lines are those that the program named, counted from 1, without repetitions.
	// The legacy variant names the line of COMMIT for what the kernel refuses; the
	// nft variant does for a jump to a chain that does not exist.
	Lines []int
	Text  string // what the program said, at most maxComplaint bytes
	Err   error  // how it ended, an *exec.ExitError
}

func (e *restoreError) Error() string { return fmt.Sprintf("restore: %s: %v", e.Text, e.Err) }
func (e *restoreError) Unwrap() error { return e.Err }

// linePattern is how the programs name lines: "line 7 failed", "at line: 7",
// "line 7: RULE_APPEND failed".
var linePattern = regexp.MustCompile(`\bline:? ([0-9]+)\b`)

func newRestoreError(complaint string, err error) *restoreError {
	e := &restoreError{Text: complaint, Err: err}
	for _, match := range linePattern.FindAllStringSubmatch(complaint, -1) {
		line, err := strconv.Atoi(match[1])
		if err == nil && !slices.Contains(e.Lines, line) {
			e.Lines = append(e.Lines, line)
		}
	}
	return e
}

// outcome is how a program ended.
type outcome struct {
	program   string
	output    []byte
	complaint string // at most maxComplaint bytes
	took      time.Duration
	err       error // nil if it succeeded
}

// explain finds the errors that have a name. The exit code does not help: 4 means
// the lock, a missing privilege, or a rule that the kernel refuses.
func (o outcome) explain() error {
	said := func(text string) bool { return strings.Contains(o.complaint, text) }
	switch {
	case said("holding the xtables lock"):
		return fmt.Errorf("%w: %s gave up after %v", errLocked, o.name(), o.took.Round(time.Millisecond))
	case said("lock file") && said("ermission denied"):
		return fmt.Errorf("%w: %w: let the process write the lock file", proxier.ErrPermission, o.plain())
	case said("ermission denied"), said("must be root"), said("peration not permitted"):
		return fmt.Errorf("%w: %w: run with CAP_NET_ADMIN in the network namespace", proxier.ErrPermission, o.plain())
	default:
		return nil
	}
}

// plain tells the error as it is.
func (o outcome) plain() error {
	if o.complaint == "" {
		return fmt.Errorf("run %s: %w", o.name(), o.err)
	}
	return fmt.Errorf("run %s: %s: %w", o.name(), o.complaint, o.err)
}

func (o outcome) name() string { return filepath.Base(o.program) }

const (
	// maxComplaint is how much of what a program says about its troubles is kept.
	maxComplaint = 16 << 10
	// waitDelay is how long a program's output may stay open after its end, which
	// takes a descendant that left its process group.
	waitDelay = time.Second
)

// run runs a program in the network namespace, with wait added to its time, and
// waits for its end. Then its process group is gone, too. The error is about
// starting it, or the end of its time or of ctx; how it ended is in the outcome.
func (c toolConfig) run(ctx context.Context, wait time.Duration, input []byte, argv ...string) (outcome, error) {
	limit := c.timeout + wait
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var output bytes.Buffer
	complaint := head{limit: maxComplaint}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &output, &complaint
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	if c.lockFile != "" {
		cmd.Env = append(cmd.Env, "XTABLES_LOCKFILE="+c.lockFile)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = waitDelay
	o := outcome{program: argv[0]}
	if err := ctx.Err(); err != nil {
		return o, fmt.Errorf("run %s: %w", o.name(), err)
	}
	began := time.Now()
	if err := namespace.Visit(c.netNS, cmd.Start); err != nil {
		return o, fmt.Errorf("start %s: %w", o.name(), err)
	}
	o.err = await(limited, cmd)
	o.took, o.output, o.complaint = time.Since(began), output.Bytes(), strings.TrimSpace(string(complaint.kept))
	if err := limited.Err(); err != nil && o.err != nil {
		return o, fmt.Errorf("run %s: killed after %v: %w", o.name(), o.took.Round(time.Millisecond), err)
	}
	return o, nil
}

// await waits for the end of a program, or makes it, and kills what is left of its
// process group. The group's number cannot be another's, because the program is
// reaped last.
func await(ctx context.Context, cmd *exec.Cmd) error {
	pid := cmd.Process.Pid
	kill := func() { _ = unix.Kill(-pid, unix.SIGKILL) } // fails only if all are gone
	killed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(killed)
		kill()
	})
	err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	for errors.Is(err, unix.EINTR) {
		err = unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
	if !stop() {
		<-killed
	}
	kill()
	return errors.Join(err, cmd.Wait())
}

// head keeps the beginning of what is written to it.
type head struct {
	kept  []byte
	limit int
}

func (h *head) Write(b []byte) (int, error) {
	h.kept = append(h.kept, b[:min(len(b), h.limit-len(h.kept))]...)
	return len(b), nil
}
