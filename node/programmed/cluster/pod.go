package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"

	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/node/programmed"
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
func (c *Client) WaitUntilLeft(ctx context.Context, pod Pod, w programmed.Waiting) error {
	changes, err := c.untilListed(ctx, pod)
	if err != nil {
		return err
	}
	errs := make([]error, len(changes))
	var waiting sync.WaitGroup
	for i, change := range changes {
		waiting.Go(func() {
			if errs[i] = programmed.Wait(ctx, w, change); errs[i] != nil && change.Service.Name != "" {
				errs[i] = fmt.Errorf("change of %s: %w", change.Service, errs[i])
			}
		})
	}
	waiting.Wait()
	return errors.Join(errs...)
}

// untilListed waits until the EndpointSlices give a pod no more connections, and returns the
// Changes that nodes must have.
func (c *Client) untilListed(ctx context.Context, pod Pod) (changes []programmed.ServiceChange, err error) {
	following, stop := context.WithCancel(ctx)
	defer stop()
	reason := errors.New("the API server has not listed its EndpointSlices") // nil when the pod has left
	departing := newDeparture(pod)
	decide := func() {
		if reason == nil {
			return
		}
		if changes, reason = departing.Changes(); reason == nil {
			stop()
		}
	}
	to := events[*discovery.EndpointSlice]{
		fresh:   true, // a pod that is not in an older list would seem to have left
		set:     func(s *discovery.EndpointSlice) { departing.Set(s); decide() },
		deleted: func(s *discovery.EndpointSlice) { departing.Delete(s.Name, s.ResourceVersion); decide() },
		all: func(all []*discovery.EndpointSlice, version string) {
			departing.Replace(all, version)
			decide()
		},
	}
	keepFollowing(following, c.slices(pod.Namespace), to, func(err error) {
		if !refused(reason) || refused(err) { // else that says more, such as than a client that gives up before a deadline
			reason = fmt.Errorf("watch EndpointSlices of namespace %s: %w", pod.Namespace, err)
		}
	})
	if reason == nil {
		return changes, nil
	}
	return nil, &NotLeftError{Reason: reason, Cause: context.Cause(ctx)}
}
