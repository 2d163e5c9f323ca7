package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// SysctlOptions are the kernel settings of connection tracking to ask for; 0 and
// false leave a setting as it is.
type SysctlOptions struct {
	// MaxPerCore is how many connections to track for each CPU of the machine, at
	// least Min and, whatever the number of CPUs, 1048576 at most. Without MaxPerCore
	// Min means nothing. The hash table gets a bucket for every four.
	MaxPerCore, Min int32
	// LowerMax lets the limit be lowered too. Otherwise one that is higher stays:
	// somebody has a reason for it.
	LowerMax bool
	// The timeouts are cut to seconds.
	TCPEstablished, TCPCloseWait, UDP, UDPStream time.Duration
	// TCPBeLiberal takes TCP packets outside of the window for valid.
	TCPBeLiberal bool

	// NetNS is the network namespace, as in proxier.Config. The limit belongs to the
	// first network namespace of the machine and is read-only in others.
	NetNS string
	// StateDir is where to remember what the settings were, so that Restore works in
	// another process; the file in it is named after Instance and the network
	// namespace. Empty remembers nothing, and then Restore does nothing.
	StateDir, Instance string
	// Logger gets what was changed; nil is silent.
	Logger *zap.Logger
}

// Validate names every option that makes no sense. Its errors are
// proxier.ErrInvalidConfig.
func (o SysctlOptions) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%w: %s: %s", proxier.ErrInvalidConfig, field, fmt.Sprintf(format, args...)))
	}
	for field, value := range map[string]int32{"MaxPerCore": o.MaxPerCore, "Min": o.Min} {
		if value < 0 {
			bad(field, "%d is negative", value)
		}
	}
	for field, value := range map[string]time.Duration{
		"TCPEstablished": o.TCPEstablished, "TCPCloseWait": o.TCPCloseWait, "UDP": o.UDP, "UDPStream": o.UDPStream,
	} {
		if value != 0 && value < time.Second {
			bad(field, "%v is less than a second, and not 0", value)
		}
	}
	return errors.Join(errs...)
}

// Sysctls brings the kernel settings of connection tracking to what is asked for,
// and can undo that. It implements proxier.Settings.
type Sysctls struct {
	options    SysctlOptions
	root       string // of /proc and /sys
	record     record // of what was changed; opened by prepare
	log        *zap.Logger
	conditions []proxier.Condition
}

var _ proxier.Settings = (*Sysctls)(nil)

// NewSysctls changes nothing yet.
func NewSysctls(o SysctlOptions) (*Sysctls, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("settings of connection tracking: %w", err)
	}
	return newSysctls("/", o), nil
}

func newSysctls(root string, o SysctlOptions) *Sysctls {
	s := &Sysctls{options: o, root: root, log: o.Logger}
	if s.log == nil {
		s.log = zap.NewNop()
	}
	return s
}

// Apply implements proxier.Settings. A setting that cannot be changed is a
// condition, and the others are still changed: in a container, for one, most of
// them cannot.
func (s *Sysctls) Apply(context.Context) []proxier.Condition {
	s.conditions = nil
	err := namespace.Visit(s.options.NetNS, func() error {
		s.prepare()
		s.apply(s.options.settings(s.cpus()))
		return nil
	})
	if err != nil {
		s.complain("kernel settings stay as they are: %v", err)
	}
	return s.conditions
}

// Restore implements proxier.Settings.
func (s *Sysctls) Restore(context.Context) error {
	return namespace.Visit(s.options.NetNS, func() error {
		s.prepare()
		return s.restore()
	})
}

// complain notes what is not as it was asked for.
func (s *Sysctls) complain(format string, args ...any) {
	s.conditions = append(s.conditions, proxier.Condition{
		Type: proxier.ConditionKernelSettings, Since: time.Now(), Message: fmt.Sprintf(format, args...),
	})
}

// setting is a number that the kernel holds in a file.
type setting struct {
	path  string // from the root
	value int64
	// atLeast leaves a greater number alone.
	atLeast bool
}

const (
	conntrackDir = "proc/sys/net/netfilter/nf_conntrack_"
	hashSize     = "sys/module/nf_conntrack/parameters/hashsize"

	// mostConnections bounds what many CPUs make of the limit per CPU, as kube-proxy does.
	mostConnections = 1 << 20
	// chainLength is how many connections there are to a bucket of the kernel's table.
	chainLength = 4
)

// settings are what the options want of the kernel, in the order to write them.
func (o *SysctlOptions) settings(cpus int) []setting {
	var all []setting
	if limit := o.limit(cpus); limit > 0 {
		all = append(all, setting{conntrackDir + "max", limit, !o.LowerMax}, setting{hashSize, limit / chainLength, true})
	}
	for _, timeout := range []struct {
		name  string
		value time.Duration
	}{
		{"tcp_timeout_established", o.TCPEstablished},
		{"tcp_timeout_close_wait", o.TCPCloseWait},
		{"udp_timeout", o.UDP},
		{"udp_timeout_stream", o.UDPStream},
	} {
		if timeout.value > 0 {
			all = append(all, setting{path: conntrackDir + timeout.name, value: int64(timeout.value / time.Second)})
		}
	}
	if o.TCPBeLiberal {
		all = append(all, setting{path: conntrackDir + "tcp_be_liberal", value: 1})
	}
	return all
}

// limit is the number of connections to track; 0 leaves it to the kernel.
func (o *SysctlOptions) limit(cpus int) int64 {
	if o.MaxPerCore == 0 {
		return 0
	}
	limit := int64(o.MaxPerCore) * int64(cpus)
	if limit > mostConnections {
		return mostConnections
	}
	return max(limit, int64(o.Min))
}

// prepare finds the record of the instance in the network namespace of the thread.
func (s *Sysctls) prepare() {
	if s.options.StateDir == "" {
		return
	}
	// Reads "net:[4026531840]", with the namespace's inode.
	namespace, err := os.Readlink(filepath.Join(s.root, "proc/thread-self/ns/net"))
	if err != nil {
		namespace = "unknown"
	}
	namespace = strings.Trim(namespace, "net:[]")
	s.record.path = filepath.Join(s.options.StateDir, fmt.Sprintf("sysctls-%s-%s.json", s.options.Instance, namespace))
}

// cpus counts those of the machine, whatever part of them we may use.
func (s *Sysctls) cpus() int {
	text, err := s.read("sys/devices/system/cpu/online") // such as "0-3,8"
	if err != nil {
		return runtime.NumCPU()
	}
	n := 0
	for part := range strings.SplitSeq(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, fromErr := strconv.Atoi(first)
		to, toErr := strconv.Atoi(last)
		if fromErr != nil || toErr != nil || to < from {
			return runtime.NumCPU()
		}
		n += to - from + 1
	}
	return n
}

// apply brings the kernel to the settings. What an earlier run has changed and
// nobody wants any more is restored.
func (s *Sysctls) apply(wanted []setting) {
	before, err := s.record.load()
	if err != nil {
		s.complain("earlier changes of kernel settings are forgotten: %v", err)
	}
	kept := slices.DeleteFunc(slices.Clone(before), func(c change) bool {
		return !slices.ContainsFunc(wanted, func(w setting) bool { return w.path == c.Path }) && s.undo(c) == nil
	})
	changes := s.plan(wanted, kept)
	if len(changes) == 0 && len(before) == 0 {
		return
	}
	// The record comes first: what is in it and did not happen does no harm.
	if err := s.record.save(merge(kept, changes)); err != nil {
		s.complain("kernel settings will not be restored: %v", err)
	}
	for _, c := range changes {
		if err := s.write(c.Path, c.New); err != nil {
			s.complain("kernel setting stays at %s, want %s: %v", c.Old, c.New, err)
			continue
		}
		s.log.Info("kernel setting changed", zap.String("setting", "/"+c.Path), zap.String("from", c.Old), zap.String("to", c.New))
		kept = merge(kept, []change{c})
	}
	if err := s.record.save(kept); err != nil {
		s.log.Debug("record is not tidy", zap.Error(err))
	}
}

// plan returns the changes that the settings need.
func (s *Sysctls) plan(wanted []setting, before []change) []change {
	var changes []change
	for _, w := range wanted {
		text, err := s.read(w.path)
		if err != nil {
			s.complain("kernel setting cannot be read, want %d: %v", w.value, err)
			continue
		}
		now, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			s.complain("kernel setting /%s is no number: %v", w.path, err)
			continue
		}
		if now == w.value || w.atLeast && now > w.value {
			continue
		}
		c := change{Path: w.path, Old: text, New: strconv.FormatInt(w.value, 10)}
		if i := slices.IndexFunc(before, c.isAbout); i >= 0 {
			c.Old = before[i].Old // what it was before us
		}
		changes = append(changes, c)
	}
	return changes
}

// restore undoes what this instance has changed and nobody else has changed
// since, and forgets it.
func (s *Sysctls) restore() error {
	changes, err := s.record.load()
	if err != nil {
		return err
	}
	var errs []error
	kept := slices.DeleteFunc(changes, func(c change) bool {
		err := s.undo(c)
		errs = append(errs, err)
		return err == nil
	})
	return errors.Join(append(errs, s.record.save(kept))...)
}

// undo restores one setting, unless it is gone or somebody else's now.
func (s *Sysctls) undo(c change) error {
	now, err := s.read(c.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("restore kernel setting: %w", err)
	case now != c.New:
		s.log.Info("kernel setting was changed by somebody else, and stays", zap.String("setting", "/"+c.Path), zap.String("value", now))
		return nil
	}
	if err := s.write(c.Path, c.Old); err != nil {
		return fmt.Errorf("restore kernel setting to %s: %w", c.Old, err)
	}
	s.log.Info("kernel setting restored", zap.String("setting", "/"+c.Path), zap.String("from", c.New), zap.String("to", c.Old))
	return nil
}

func (s *Sysctls) read(path string) (string, error) {
	text, err := os.ReadFile(filepath.Join(s.root, path))
	return strings.TrimSpace(string(text)), err
}

// write never creates a file.
func (s *Sysctls) write(path, value string) error {
	file, err := os.OpenFile(filepath.Join(s.root, path), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	return cmp.Or(err, file.Close())
}
