package cluster

import (
	"context"
	"fmt"
	"time"

	coordination "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/serviceplane/serviceplane/internal/apiclient"
	"github.com/serviceplane/serviceplane/internal/pause"
)

// Client is a client of an API server. Its methods are safe for concurrent use.
type Client struct {
	core, leases, discovery *rest.RESTClient // of Nodes, Leases and EndpointSlices
}

// New returns a Client. It sends nothing yet.
func New(config *rest.Config) (*Client, error) {
	config = rest.CopyConfig(config)
	config.ContentType = runtime.ContentTypeJSON // writes are few and small
	clients, err := apiclient.New(config)
	if err != nil {
		return nil, fmt.Errorf("create client: %w", err)
	}
	c := &Client{}
	for client, group := range map[**rest.RESTClient]schema.GroupVersion{
		&c.core: v1.SchemeGroupVersion, &c.leases: coordination.SchemeGroupVersion, &c.discovery: discovery.SchemeGroupVersion,
	} {
		if *client, err = clients.For(group); err != nil {
			return nil, fmt.Errorf("create client: %w", err)
		}
	}
	return c, nil
}

func (c *Client) slices(namespace string) cache.ListerWatcherWithContext {
	return cache.ToListerWatcherWithContext(cache.NewFilteredListWatchFromClient(c.discovery, "endpointslices", namespace, func(*metav1.ListOptions) {}))
}

func (c *Client) leasesOf(namespace string, selection func(*metav1.ListOptions)) cache.ListerWatcherWithContext {
	return cache.ToListerWatcherWithContext(cache.NewFilteredListWatchFromClient(c.leases, "leases", namespace, selection))
}

// object is what follow passes on.
type object[T any] interface {
	*T
	metav1.Object
}

// events take what follow hears: lists, and the changes after them.
type events[P any] struct {
	set     func(P)
	deleted func(object P) // with the version of the deletion
	all     func(objects []P, version string)
	// fresh lists from what the API server has stored, and not from its memory, which may be older.
	fresh bool
}

// watchPause is the pause before a watch that has ended begins again.
const watchPause = time.Second

// follow lists objects and watches them, until ctx ends or a request fails.
func follow[T any, P object[T]](ctx context.Context, from cache.ListerWatcherWithContext, to events[P]) error {
	options := metav1.ListOptions{ResourceVersion: "0"}
	if to.fresh {
		options.ResourceVersion = ""
	}
	list, err := from.ListWithContext(ctx, options)
	if err != nil {
		return err
	}
	accessor, err := meta.ListAccessor(list)
	if err != nil {
		return err
	}
	items, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	objects := make([]P, 0, len(items))
	for _, item := range items {
		if o, ok := item.(P); ok {
			objects = append(objects, o)
		}
	}
	version := accessor.GetResourceVersion()
	to.all(objects, version)
	for {
		if version, err = watchFrom(ctx, from, version, to); err != nil {
			return err
		}
		if !pause.For(ctx, watchPause) {
			return context.Cause(ctx)
		}
	}
}

// watchFrom watches until the API server ends the watch, and returns the version to continue from.
func watchFrom[T any, P object[T]](ctx context.Context, from cache.ListerWatcherWithContext, version string, to events[P]) (string, error) {
	w, err := from.WatchWithContext(ctx, metav1.ListOptions{ResourceVersion: version, AllowWatchBookmarks: true})
	if err != nil {
		return version, err
	}
	defer w.Stop()
	for event := range w.ResultChan() {
		if event.Type == watch.Error {
			return version, apierrors.FromObject(event.Object)
		}
		o, ok := event.Object.(P)
		if !ok {
			continue
		}
		version = o.GetResourceVersion()
		switch event.Type {
		case watch.Deleted:
			to.deleted(o)
		case watch.Bookmark:
		default:
			to.set(o)
		}
	}
	return version, nil
}

// refused reports whether the API server does not let the client do something. It is not final: a server that
// has just started may not know its roles yet.
func refused(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) || apierrors.IsNotFound(err)
}

// longestPause is the longest pause after what was refused.
const longestPause = 30 * time.Second

// pauseAfter returns the pause after a failure, if the last one was so long.
func pauseAfter(err error, last time.Duration) time.Duration {
	if !refused(err) {
		return watchPause
	}
	return min(max(watchPause, 2*last), longestPause)
}

// keepFollowing repeats follow after failures until ctx ends. failed gets each failure. All calls are of the
// caller's goroutine.
func keepFollowing[T any, P object[T]](ctx context.Context, from cache.ListerWatcherWithContext, to events[P], failed func(error)) {
	for wait := time.Duration(0); ctx.Err() == nil; pause.For(ctx, wait) {
		err := follow(ctx, from, to)
		if ctx.Err() == nil {
			failed(err)
		}
		wait = pauseAfter(err, wait)
	}
}
