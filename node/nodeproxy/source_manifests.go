package nodeproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/internal/manifest"
	"github.com/serviceplane/serviceplane/proxier"
)

const (
	// debounce is the pause after the last change before the directory is read: files
	// may be incomplete while they are written.
	debounce = 100 * time.Millisecond
	// debounceMax bounds the pause after the first change.
	debounceMax = time.Second
	// rereadInterval is the period of reads without notifications: some file systems send
	// none, and the targets of links are not watched.
	rereadInterval = 30 * time.Second
	// retryInterval is the pause before a directory or file is read again after an error.
	retryInterval = time.Second
)

// manifestSource returns the task that watches a directory of manifests. The directory
// must exist.
func manifestSource(path, node string, p proxier.Provider, log *zap.Logger) (func(context.Context) error, error) {
	switch info, err := os.Stat(path); {
	case err != nil:
		return nil, fmt.Errorf("open directory of manifests: %w", err)
	case !info.IsDir():
		return nil, fmt.Errorf("open directory of manifests: %s is a file", path)
	}
	w := &directoryWatch{path: path, log: log, files: newManifests(path, log), feed: &feed{node: node, provider: p, log: log}, newWatcher: fsnotify.NewWatcher}
	return func(ctx context.Context) error {
		return returnSoon(ctx, func() error { return w.run(ctx) })
	}, nil
}

// shutdownTimeout bounds the wait for a file system after the end of the context.
const shutdownTimeout = 300 * time.Millisecond

// returnSoon runs f, and returns at most shutdownTimeout after the end of ctx: a network file system
// can block for as long as its server is gone. The process ends first.
func returnSoon(ctx context.Context, f func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- f() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(shutdownTimeout):
		return nil
	}
}

// directoryWatch feeds the provider with the objects in a directory.
type directoryWatch struct {
	path  string
	log   *zap.Logger
	files *manifests
	feed  *feed
	// newWatcher makes watcher, which is nil until that succeeds.
	newWatcher func() (*fsnotify.Watcher, error)
	watcher    *fsnotify.Watcher
	// failure is the error that was logged last, blind that of the watch.
	failure, blind lastFailure
}

func (w *directoryWatch) run(ctx context.Context) error {
	defer func() {
		if w.watcher != nil {
			_ = w.watcher.Close() // nothing is lost
		}
	}()
	again, err := w.refresh(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	w.feed.synced()
	return w.follow(ctx, again)
}

// follow reads the directory after changes, and periodically, until ctx ends.
func (w *directoryWatch) follow(ctx context.Context, again time.Duration) error {
	wake := time.NewTimer(again)
	defer wake.Stop()
	var since time.Time // of the oldest change that was not read
	changed := func() {
		if since.IsZero() {
			since = time.Now()
		}
		wake.Reset(min(debounce, max(0, debounceMax-time.Since(since))))
	}
	for {
		var (
			events chan fsnotify.Event
			errs   chan error
		)
		if w.watcher != nil {
			events, errs = w.watcher.Events, w.watcher.Errors
		}
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-events:
			if !ok {
				return errors.New("watch manifests: the watch ended")
			}
			if event.Op != fsnotify.Chmod {
				changed()
			}
		case err := <-errs:
			w.log.Warn("watch of manifests failed, the directory is read again", zap.Error(err))
			changed()
		case <-wake.C:
			since = time.Time{}
			wake.Reset(w.reread(ctx))
		}
	}
}

// reread is refresh for a directory that has been read before. One that cannot be read changes nothing, and is
// logged once.
func (w *directoryWatch) reread(ctx context.Context) (again time.Duration) {
	again, err := w.refresh(ctx)
	if ctx.Err() == nil && w.failure.isNew(err) {
		w.log.Error("directory of manifests cannot be read, its objects stay", zap.Error(err))
	}
	if err != nil {
		return retryInterval
	}
	return again
}

// refresh watches the directory, which may have been replaced, and reads it. It returns
// the pause until the next read.
func (w *directoryWatch) refresh(ctx context.Context) (again time.Duration, err error) {
	watchErr := w.watch()
	if again, err = w.files.read(ctx); err != nil {
		return 0, err
	}
	if w.blind.isNew(watchErr) {
		w.log.Warn("changes of manifests are not notified: they are read again periodically; raise fs.inotify.max_user_instances or max_user_watches",
			zap.String("directory", w.path), zap.Duration("period", rereadInterval), zap.Error(watchErr))
	}
	w.feed.update(w.files.objects())
	return again, nil
}

// watch makes the kernel tell of changes. A node may have no inotify instance or watch left.
func (w *directoryWatch) watch() (err error) {
	if w.watcher == nil {
		if w.watcher, err = w.newWatcher(); err != nil {
			return err
		}
	}
	return w.watcher.Add(w.path)
}

// feed calls a provider with the differences between sets of objects.
type feed struct {
	node     string
	provider proxier.Provider
	log      *zap.Logger
	current  map[key]manifest.Value // what the provider has
}

// update passes objects that are new, changed or deleted to the provider. The Node comes
// first, the others in the order of their names.
func (f *feed) update(objects map[key]manifest.Value) {
	for _, k := range sorted(objects) {
		before, after := f.current[k], objects[k]
		if before == nil || !equality.Semantic.DeepEqual(before, after) {
			f.put(before, after)
		}
	}
	for _, k := range sorted(f.current) {
		if objects[k] == nil {
			f.remove(f.current[k])
		}
	}
	f.current = objects
}

func sorted(objects map[key]manifest.Value) []key {
	return slices.SortedFunc(maps.Keys(objects), func(a, b key) int {
		rank := func(k key) int { return slices.Index([]string{"Node", "Service", "EndpointSlice"}, k.kind) }
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
}

func (f *feed) put(before, after manifest.Value) {
	switch object := after.(type) {
	case *v1.Node:
		if object.Name == f.node {
			f.provider.OnNodeChange(informer.NodeOf(object))
		}
	case *v1.Service:
		if old, ok := before.(*v1.Service); ok {
			f.provider.OnServiceUpdate(old, object)
			return
		}
		f.provider.OnServiceAdd(object)
	case *discovery.EndpointSlice:
		if old, ok := before.(*discovery.EndpointSlice); ok {
			f.provider.OnEndpointSliceUpdate(old, object)
			return
		}
		f.provider.OnEndpointSliceAdd(object)
	}
}

// remove deletes an object. The node stays as it was: it exists, because the proxy runs
// on it.
func (f *feed) remove(value manifest.Value) {
	switch object := value.(type) {
	case *v1.Service:
		f.provider.OnServiceDelete(object)
	case *discovery.EndpointSlice:
		f.provider.OnEndpointSliceDelete(object)
	}
}

// synced reports to the provider that it has all objects.
func (f *feed) synced() {
	if f.current[key{kind: "Node", name: f.node}] == nil {
		f.log.Warn("no manifest has this Node: the proxy works without its addresses, zone and pod CIDRs", zap.String("node", f.node))
		f.provider.OnNodeChange(changetracker.Node{Name: f.node}) // the provider waits for it
	}
	f.provider.OnServiceSynced()
	f.provider.OnEndpointSlicesSynced()
}
