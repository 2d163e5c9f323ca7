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

	"github.com/serviceplane/serviceplane/internal/invalid"
	"github.com/serviceplane/serviceplane/internal/namespace"
	"github.com/serviceplane/serviceplane/proxier"
)

// SysctlOptions are the kernel settings of connection tracking to apply; 0 and
// false leave a setting unchanged.
type SysctlOptions struct {
	// MaxPerCore is the number of connections to track per CPU of the machine. The limit
	// is at least Min; MaxPerCore × CPUs is at most 1048576. Without MaxPerCore, Min has no
	// effect. The hash table gets one bucket per four connections.
	MaxPerCore, Min int32
	// LowerMax also lowers the limit. Otherwise a higher limit stays, since another
	// program may need it.
	LowerMax bool
	// The timeouts are truncated to seconds.
	TCPEstablished, TCPCloseWait, UDP, UDPStream time.Duration
	// TCPBeLiberal accepts TCP packets outside the window as valid.
	TCPBeLiberal bool
	// Accounting counts the packets and bytes of connections that begin from then on, as
	// proxier.Config.CountTraffic needs.
	Accounting bool

	// NetNS is the network namespace, as in proxier.Config. The limit belongs to the
	// initial network namespace of the machine and is read-only in others.
	NetNS string
	// StateDir is the directory for the previous values, so that Restore works in another
	// process. The file is named after Instance and the network namespace. If it is empty,
	// nothing is stored, and Restore does nothing.
	StateDir, Instance string
	// Logger receives the changes; nil means no logging.
	Logger *zap.Logger
}

// Validate reports every invalid option. Its errors are proxier.ErrInvalidConfig.
func (o SysctlOptions) Validate() error {
	errs := invalid.Fields{}
	for field, value := range map[string]int32{"MaxPerCore": o.MaxPerCore, "Min": o.Min} {
		if value < 0 {
			errs.Add(field, "%d is negative", value)
		}
	}
	for field, value := range map[string]time.Duration{
		"TCPEstablished": o.TCPEstablished, "TCPCloseWait": o.TCPCloseWait, "UDP": o.UDP, "UDPStream": o.UDPStream,
	} {
		if value != 0 && value < time.Second {
			errs.Add(field, "%v is less than a second and not 0", value)
		}
	}
	return errors.Join(errs...)
}

// sysctls are the Settings of NewSysctls.
type sysctls struct {
	options    SysctlOptions
	root       string // of /proc and /sys
	record     record // of the changes; prepare sets its path
	log        *zap.Logger
	conditions []proxier.Condition
}

// NewSysctls returns what applies the kernel settings of connection tracking, and can undo that. It changes no
// setting yet. A setting that cannot be changed becomes a condition, and the others are still changed. In a
// container most of them cannot be changed.
func NewSysctls(o SysctlOptions) (proxier.Settings, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("kernel settings of connection tracking: %w", err)
	}
	return newSysctls("/", o), nil
}

func newSysctls(root string, o SysctlOptions) *sysctls {
	s := &sysctls{options: o, root: root, log: o.Logger}
	s.log = cmp.Or(s.log, zap.NewNop())
	return s
}

// Apply implements proxier.Settings.
func (s *sysctls) Apply(context.Context) []proxier.Condition {
	s.conditions = nil
	err := namespace.Visit(s.options.NetNS, func() error {
		s.prepare()
		s.apply(s.options.settings(s.cpus()))
		return nil
	})
	if err != nil {
		s.addCondition("kernel settings are not applied: %v", err)
	}
	return s.conditions
}

// Restore implements proxier.Settings.
func (s *sysctls) Restore(context.Context) error {
	return namespace.Visit(s.options.NetNS, func() error {
		s.prepare()
		return s.restore()
	})
}

func (s *sysctls) addCondition(format string, args ...any) {
	s.conditions = append(s.conditions, proxier.Condition{
		Type: proxier.ConditionKernelSettings, Since: time.Now(), Message: fmt.Sprintf(format, args...),
	})
}

// setting is a number in a file of the kernel.
type setting struct {
	path    string // from the root
	value   int64
	atLeast bool // a greater number stays
}

const (
	conntrackDir = "proc/sys/net/netfilter/nf_conntrack_"
	hashSize     = "sys/module/nf_conntrack/parameters/hashsize"

	// maxConnections bounds MaxPerCore × CPUs, as with kube-proxy.
	maxConnections = 1 << 20
	// connectionsPerBucket is that of the kernel's hash table, as with kube-proxy.
	connectionsPerBucket = 4
)

// settings returns the settings to apply, in the order of writing.
func (o *SysctlOptions) settings(cpus int) []setting {
	var all []setting
	if limit := o.limit(cpus); limit > 0 {
		all = append(all, setting{conntrackDir + "max", limit, !o.LowerMax}, setting{hashSize, limit / connectionsPerBucket, true})
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
	for _, s := range []struct {
		name string
		on   bool
	}{{"tcp_be_liberal", o.TCPBeLiberal}, {"acct", o.Accounting}} {
		if s.on {
			all = append(all, setting{path: conntrackDir + s.name, value: 1})
		}
	}
	return all
}

// limit returns the number of connections to track; 0 leaves it unchanged.
func (o *SysctlOptions) limit(cpus int) int64 {
	if o.MaxPerCore == 0 {
		return 0
	}
	limit := int64(o.MaxPerCore) * int64(cpus)
	if limit > maxConnections {
		return maxConnections
	}
	return max(limit, int64(o.Min))
}

// prepare sets the path of the record, for the network namespace of this thread.
func (s *sysctls) prepare() {
	if s.options.StateDir == "" {
		return
	}
	// The link is "net:[4026531840]", with the inode of the namespace.
	namespace, err := os.Readlink(filepath.Join(s.root, "proc/thread-self/ns/net"))
	if err != nil {
		namespace = "unknown"
	}
	namespace = strings.Trim(namespace, "net:[]")
	s.record.path = filepath.Join(s.options.StateDir, fmt.Sprintf("sysctls-%s-%s.json", s.options.Instance, namespace))
}

// cpus counts the CPUs of the machine, not only those that this process may use.
func (s *sysctls) cpus() int {
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

// apply writes the settings. It restores settings that an earlier process has changed and
// that are not wanted any more.
func (s *sysctls) apply(wanted []setting) {
	before, err := s.record.load()
	if err != nil {
		s.addCondition("earlier changes of kernel settings cannot be restored: %v", err)
	}
	save := s.record.save
	if err != nil && !errors.Is(err, errBroken) {
		// It may be read later, and must not be replaced before.
		save = func(changes []change) error { s.record.unsaved = changes; return err }
	}
	kept := slices.DeleteFunc(slices.Clone(before), func(c change) bool {
		return !slices.ContainsFunc(wanted, func(w setting) bool { return w.path == c.Path }) && s.undo(c) == nil
	})
	changes := s.plan(wanted, kept)
	if len(changes) == 0 && len(before) == 0 {
		return
	}
	// The record is written first: a recorded change that did not happen does no harm.
	if err := save(merge(kept, changes)); err != nil {
		s.addCondition("kernel settings will not be restored if this process ends: %v: the process must be able to write there", err)
	}
	for _, c := range changes {
		if err := s.write(c.Path, c.New); err != nil {
			s.addCondition("kernel setting stays at %s, want %s: %v", c.Old, c.New, err)
			continue
		}
		s.log.Info("kernel setting changed", zap.String("setting", "/"+c.Path), zap.String("from", c.Old), zap.String("to", c.New))
		kept = merge(kept, []change{c})
	}
	if err := save(kept); err != nil {
		s.log.Debug("record of kernel settings is not updated", zap.Error(err))
	}
}

// plan returns the changes that apply has to make.
func (s *sysctls) plan(wanted []setting, before []change) []change {
	var changes []change
	for _, w := range wanted {
		text, err := s.read(w.path)
		if err != nil {
			s.addCondition("kernel setting cannot be read, want %d: %v", w.value, err)
			continue
		}
		now, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			s.addCondition("kernel setting /%s is not a number: %v", w.path, err)
			continue
		}
		if now == w.value || w.atLeast && now > w.value {
			continue
		}
		c := change{Path: w.path, Old: text, New: strconv.FormatInt(w.value, 10)}
		if i := slices.IndexFunc(before, c.samePath); i >= 0 {
			c.Old = before[i].Old // the value before this instance
		}
		changes = append(changes, c)
	}
	return changes
}

// restore undoes all recorded changes, and removes them from the record.
func (s *sysctls) restore() error {
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

// undo restores one setting. It does nothing if the setting is gone, or if another program
// has changed it since.
func (s *sysctls) undo(c change) error {
	now, err := s.read(c.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("restore kernel setting: %w", err)
	case now != c.New:
		s.log.Info("kernel setting was changed by another program and is not restored", zap.String("setting", "/"+c.Path), zap.String("value", now))
		return nil
	}
	if err := s.write(c.Path, c.Old); err != nil {
		return fmt.Errorf("restore kernel setting to %s: %w", c.Old, err)
	}
	s.log.Info("kernel setting restored", zap.String("setting", "/"+c.Path), zap.String("from", c.New), zap.String("to", c.Old))
	return nil
}

func (s *sysctls) read(path string) (string, error) {
	text, err := os.ReadFile(filepath.Join(s.root, path))
	return strings.TrimSpace(string(text)), err
}

// write never creates a file.
func (s *sysctls) write(path, value string) error {
	file, err := os.OpenFile(filepath.Join(s.root, path), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	return cmp.Or(err, file.Close())
}
