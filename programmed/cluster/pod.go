package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/programmed"
)

// NotLeftError is the error of WaitUntilLeft when EndpointSlices still give the pod connections.
type NotLeftError struct {
	// Reason is why; Cause is why the wait ended, such as context.DeadlineExceeded.
	Reason, Cause error
}

// Error says both.
func (e *NotLeftError) Error() string {
	return fmt.Sprintf("the pod still gets connections (%v): %v", e.Cause, e.Reason)
}

// Unwrap returns the Cause.
func (e *NotLeftError) Unwrap() error { return e.Cause }

// WaitUntilLeft waits until no node sends new connections to a pod that ends: until its
// EndpointSlices have it as ready no more, and all nodes have programmed that and say that they do
// not send to it: a node without a better endpoint sends to one that ends. When ctx ends first, the
// error is a *NotLeftError, or has the *programmed.BehindError of each Service for which some nodes
// are behind. An API server that refuses is asked again until then.
func (c *Client) WaitUntilLeft(ctx context.Context, pod programmed.Pod, w programmed.Waiting) error {
	changes, err := c.untilListed(ctx, pod)
	if err != nil {
		return err
	}
	errs := make([]error, len(changes))
	var waiting errgroup.Group
	for i, change := range changes {
		waiting.Go(func() error {
			if errs[i] = programmed.Wait(ctx, w, change); errs[i] != nil && change.Service.Name != "" {
				errs[i] = fmt.Errorf("change of %s: %w", change.Service, errs[i])
			}
			return nil
		})
	}
	_ = waiting.Wait() // they are in errs
	return errors.Join(errs...)
}

// untilListed waits until the EndpointSlices give a pod no more connections, and returns the
// Changes that nodes must have.
func (c *Client) untilListed(ctx context.Context, pod programmed.Pod) (changes []programmed.Change, err error) {
	from, err := c.slices(pod.Namespace)
	if err != nil {
		return nil, fmt.Errorf("create client: %w", err)
	}
	following, stop := context.WithCancel(ctx)
	defer stop()
	var (
		mu        sync.Mutex // guards reason and departure
		reason    = errors.New("the API server has not listed its EndpointSlices")
		departure = programmed.NewDeparture(pod)
		listed    bool
		left      = make(chan []programmed.Change, 1)
	)
	decide := func() {
		all, why := departure.Changes()
		if reason = why; listed && why == nil {
			select {
			case left <- all:
			default:
			}
			stop()
		}
	}
	locked := func(f func()) { mu.Lock(); defer mu.Unlock(); f() }
	to := events[*discovery.EndpointSlice]{
		fresh: true, // a pod that is not in an older list would seem to have left
		set:   func(s *discovery.EndpointSlice) { locked(func() { departure.Set(s); decide() }) },
		deleted: func(s *discovery.EndpointSlice) {
			locked(func() { departure.Delete(s.Name, s.ResourceVersion); decide() })
		},
		all: func(all []*discovery.EndpointSlice, version string) {
			locked(func() { listed = true; departure.Replace(all, version); decide() })
		},
	}
	keepFollowing(following, from, to, func(err error) {
		locked(func() {
			if !refused(reason) || refused(err) { // else that says more, such as than a client that gives up before a deadline
				reason = fmt.Errorf("watch EndpointSlices of namespace %s: %w", pod.Namespace, err)
			}
		})
	})
	select {
	case changes = <-left:
		return changes, nil
	default:
	}
	mu.Lock()
	defer mu.Unlock()
	return nil, &NotLeftError{Reason: reason, Cause: context.Cause(ctx)}
}
