package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/proxier"
)

const (
	// quiet is how long a directory must be left alone before it is read: a file
	// that is being written is broken, or holds less than it will.
	quiet = 100 * time.Millisecond
	// impatience bounds the wait for quiet.
	impatience = time.Second
	// reread is how often the directory is read even if nothing was heard of it:
	// some file systems tell nothing, and links lead out of the directory.
	reread = 30 * time.Second
	// retry is how soon a directory that cannot be read is tried again.
	retry = time.Second
)

// manifestSource follows a directory of files. The directory must exist.
func manifestSource(path, node string, p proxier.Provider, log *zap.Logger) (func(context.Context) error, error) {
	switch info, err := os.Stat(path); {
	case err != nil:
		return nil, fmt.Errorf("open directory of manifests: %w", err)
	case !info.IsDir():
		return nil, fmt.Errorf("open directory of manifests: %s is a file", path)
	}
	w := &directoryWatch{path: path, log: log, files: newManifests(path, log), feed: &feed{node: node, provider: p, log: log}}
	return func(ctx context.Context) error {
		return leaveSoon(ctx, func() error { return w.run(ctx) }) // a file system may not answer
	}, nil
}

// directoryWatch feeds the provider with what is in a directory.
type directoryWatch struct {
	path  string
	log   *zap.Logger
	files *manifests
	feed  *feed
	// failure is what was logged last about reading.
	failure string
}

func (w *directoryWatch) run(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch manifests: %w", err)
	}
	defer func() { _ = watcher.Close() }() // it has nothing to lose
	again, err := w.refresh(ctx, watcher)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	w.feed.synced()
	return w.follow(ctx, watcher, again)
}

// follow reads the directory after every change, and again after some time, until
// ctx ends.
func (w *directoryWatch) follow(ctx context.Context, watcher *fsnotify.Watcher, again time.Duration) error {
	wake := time.NewTimer(again)
	defer wake.Stop()
	var since time.Time // of the oldest change that is not read
	changed := func() {
		if since.IsZero() {
			since = time.Now()
		}
		wake.Reset(min(quiet, max(0, impatience-time.Since(since))))
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-watcher.Events:
			if !ok {
				return errors.New("watch manifests: the watch ended")
			}
			if event.Op != fsnotify.Chmod {
				changed()
			}
		case err := <-watcher.Errors:
			w.log.Warn("changes of manifests may have been missed", zap.Error(err))
			changed()
		case <-wake.C:
			since = time.Time{}
			again, err := w.refresh(ctx, watcher)
			if ctx.Err() != nil {
				return nil
			}
			wake.Reset(w.next(again, err))
		}
	}
}

// next is when to read again if nothing is heard. A directory that cannot be read
// leaves everything as it is, and is logged once.
func (w *directoryWatch) next(again time.Duration, err error) time.Duration {
	if err == nil {
		w.failure = ""
		return again
	}
	if err.Error() != w.failure {
		w.log.Error("manifests cannot be read, what they held stays", zap.Error(err))
		w.failure = err.Error()
	}
	return retry
}

// refresh watches the directory, if it is not watched any more or is another one,
// and then reads it. It returns when to do so again.
func (w *directoryWatch) refresh(ctx context.Context, watcher *fsnotify.Watcher) (again time.Duration, err error) {
	if err := watcher.Add(w.path); err != nil {
		return 0, fmt.Errorf("watch directory of manifests %s: %w", w.path, err)
	}
	if again, err = w.files.read(ctx); err != nil {
		return 0, err
	}
	w.feed.bring(w.files.objects())
	return again, nil
}
