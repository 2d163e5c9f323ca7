package main

import (
	"cmp"
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
)

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

// settings are what the flags want of the kernel, in the order to write them.
func (c *conntrack) settings(cpus int) []setting {
	var all []setting
	if limit := c.limit(cpus); limit > 0 {
		all = append(all, setting{conntrackDir + "max", limit, true}, setting{hashSize, limit / chainLength, true})
	}
	for _, timeout := range []struct {
		name  string
		value time.Duration
	}{
		{"tcp_timeout_established", c.established},
		{"tcp_timeout_close_wait", c.closeWait},
		{"udp_timeout", c.udpTimeout},
		{"udp_timeout_stream", c.udpStream},
	} {
		if timeout.value > 0 {
			all = append(all, setting{path: conntrackDir + timeout.name, value: int64(timeout.value / time.Second)})
		}
	}
	if c.beLiberal {
		all = append(all, setting{path: conntrackDir + "tcp_be_liberal", value: 1})
	}
	return all
}

// limit is the number of connections to track; 0 leaves it to the kernel.
func (c *conntrack) limit(cpus int) int64 {
	if c.maxPerCore == 0 {
		return 0
	}
	limit := int64(c.maxPerCore) * int64(cpus)
	if limit > mostConnections {
		return mostConnections
	}
	return max(limit, int64(c.min))
}

// sysctls changes kernel settings, and remembers what they were.
type sysctls struct {
	root   string // of /proc and /sys
	record record
	log    *zap.Logger
}

// newSysctls changes nothing yet. The record is that of an instance in the
// network namespace of the process.
func newSysctls(root, stateDir, instance string, log *zap.Logger) *sysctls {
	// Reads "net:[4026531840]", with the namespace's inode.
	namespace, err := os.Readlink(filepath.Join(root, "proc/self/ns/net"))
	if err != nil {
		namespace = "unknown"
	}
	namespace = strings.Trim(namespace, "net:[]")
	path := filepath.Join(stateDir, fmt.Sprintf("sysctls-%s-%s.json", instance, namespace))
	return &sysctls{root: root, record: record{path}, log: log}
}

// cpus counts those of the machine, whatever part of them we may use.
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

// apply brings the kernel to the settings. A setting that cannot be changed is
// logged, and the others are still changed: in a container, for one, most of them
// cannot. What an earlier run has changed and nobody wants any more is restored.
func (s *sysctls) apply(wanted []setting) {
	before, err := s.record.load()
	if err != nil {
		s.log.Warn("earlier changes of kernel settings are forgotten", zap.Error(err))
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
		s.log.Warn("--cleanup will not restore kernel settings", zap.Error(err))
	}
	for _, c := range changes {
		if err := s.write(c.Path, c.New); err != nil {
			s.log.Warn("kernel setting stays as it is", zap.String("wanted", c.New), zap.Error(err))
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
func (s *sysctls) plan(wanted []setting, before []change) []change {
	var changes []change
	for _, w := range wanted {
		text, err := s.read(w.path)
		if err != nil {
			s.log.Warn("kernel setting is not there", zap.Int64("wanted", w.value), zap.Error(err))
			continue
		}
		now, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			s.log.Warn("kernel setting is no number", zap.String("setting", "/"+w.path), zap.Error(err))
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

// undo restores one setting, unless it is gone or somebody else's now.
func (s *sysctls) undo(c change) error {
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
