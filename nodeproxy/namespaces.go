package nodeproxy

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/ebpf"
)

// openNamespaces reads the folder of network namespaces, if there is one.
func (s *socketFlags) openNamespaces(log *zap.Logger) {
	if s.onlyIn == "" && s.skipIn == "" {
		return
	}
	s.namespaces = namespaceFolder{log: log, dir: cmp.Or(s.onlyIn, s.skipIn), list: &ebpf.Namespaces{Only: s.onlyIn != ""}, listed: map[string]os.FileInfo{}}
	if s.onlyIn != "" {
		if err := s.namespaces.add("/proc/self/ns/net"); err != nil {
			log.Warn("sockets of the node are left to the rules", zap.Error(err))
		}
	}
	s.namespaces.look()
}

// namespaceFolder follows the network namespaces that are mounted in a folder.
type namespaceFolder struct {
	log    *zap.Logger
	dir    string
	list   *ebpf.Namespaces       // nil without a folder
	listed map[string]os.FileInfo // by path
	failed string                 // what the log has last
}

// namespacePause is the time between two looks at the folder: until then, rules serve a new pod.
const namespacePause = time.Second

// follow is a task.
func (n *namespaceFolder) follow(ctx context.Context) error {
	if n.list == nil {
		return nil
	}
	tick := time.NewTicker(namespacePause)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			n.look()
		}
	}
}

// look lists what is new, and forgets what is gone. A file that is no network namespace yet is tried
// again: container runtimes create it before they mount one there.
func (n *namespaceFolder) look() {
	entries, err := os.ReadDir(n.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // nobody has made a namespace yet
		n.warn(err.Error()) // and keep those that are listed
		return
	}
	failed, there := "", map[string]bool{}
	for _, entry := range entries {
		path := filepath.Join(n.dir, entry.Name())
		if err := n.add(path); err != nil {
			failed = err.Error()
		}
		there[path] = true
	}
	for path := range n.listed {
		if filepath.Dir(path) == n.dir && !there[path] {
			delete(n.listed, path)
			if err := n.list.Remove(path); err != nil {
				failed = err.Error()
			}
		}
	}
	n.warn(failed)
}

// warn logs a failure once; "" is none.
func (n *namespaceFolder) warn(failed string) {
	if failed != "" && failed != n.failed {
		n.log.Warn("a network namespace cannot be listed for sockets, trying again", zap.String("folder", n.dir), zap.String("error", failed))
	}
	n.failed = failed
}

// add lists the network namespace of a path, if it is not listed yet.
func (n *namespaceFolder) add(path string) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) { // it has just gone
		return nil
	}
	if err == nil && (n.listed[path] == nil || !os.SameFile(info, n.listed[path])) {
		if err = n.list.Add(path); err == nil {
			n.listed[path] = info
		}
	}
	return err
}
