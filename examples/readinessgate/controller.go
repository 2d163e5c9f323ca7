package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/zapr"
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/runner"
)

// controller compares all pods that have the gate with its EndpointSlices whenever an object has
// changed. All that it knows is in the objects of the API server.
type controller struct {
	gate        v1.PodConditionType
	reportAfter time.Duration // how long a pod waits until it is reported
	log         *zap.Logger
	all         programmed.Waiting // asks all nodes

	core, discovery        *rest.RESTClient
	pods, services, slices cache.SharedIndexInformer
	waits                  map[types.UID]*wait // by the pod; of sync alone
	waiting                sync.WaitGroup
}

// wait is a pod whose EndpointSlices are not on every node.
type wait struct {
	pod     *v1.Pod
	changes []programmed.ServiceChange
	stop    context.CancelFunc
	ended   <-chan struct{}
}

// The indexes.
const (
	gated       = "gated"     // the pods that have the gate, under ""
	ours        = "ours"      // our EndpointSlices, under ""
	ofService   = "service"   // EndpointSlices, under NAMESPACE/SERVICE
	ofNamespace = "namespace" // Services
)

// connect makes the clients and the informers.
func (c *controller) connect(config *rest.Config) error {
	config = rest.CopyConfig(config)
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	config.UserAgent = rest.DefaultKubernetesUserAgent()
	config.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(config.QPS, config.Burst) // for both groups together
	scheme := runtime.NewScheme()
	errs := [5]error{v1.AddToScheme(scheme), discovery.AddToScheme(scheme)}
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.GroupVersion, config.APIPath = &v1.SchemeGroupVersion, "/api"
	var err error
	if c.core, err = rest.RESTClientFor(config); err != nil {
		return err
	}
	config.GroupVersion, config.APIPath = &discovery.SchemeGroupVersion, "/apis"
	if c.discovery, err = rest.RESTClientFor(config); err != nil {
		return err
	}
	c.pods, errs[2] = informerOf(c.core, "pods", &v1.Pod{}, cache.Indexers{gated: func(object any) ([]string, error) {
		p, ok := object.(*v1.Pod)
		return under("", ok && hasGate(p, c.gate))
	}})
	c.services, errs[3] = informerOf(c.core, "services", &v1.Service{}, cache.Indexers{ofNamespace: cache.MetaNamespaceIndexFunc})
	c.slices, errs[4] = informerOf(c.discovery, "endpointslices", &discovery.EndpointSlice{}, cache.Indexers{
		ours: func(object any) ([]string, error) {
			s, ok := object.(*discovery.EndpointSlice)
			return under("", ok && isOurs(s))
		},
		ofService: func(object any) ([]string, error) {
			s, ok := object.(*discovery.EndpointSlice)
			if !ok {
				return nil, nil
			}
			return []string{s.Namespace + "/" + s.Labels[discovery.LabelServiceName]}, nil
		},
	})
	return errors.Join(errs[:]...)
}

func isOurs(s *discovery.EndpointSlice) bool { return s.Labels[discovery.LabelManagedBy] == manager }

func under(key string, is bool) ([]string, error) {
	if !is {
		return nil, nil
	}
	return []string{key}, nil
}

func informerOf(client *rest.RESTClient, resource string, like runtime.Object, indexers cache.Indexers) (cache.SharedIndexInformer, error) {
	source := cache.NewListWatchFromClient(client, resource, metav1.NamespaceAll, fields.Everything())
	i := cache.NewSharedIndexInformer(source, like, 0, indexers)
	return i, i.SetTransform(func(object any) (any, error) {
		if o, err := meta.Accessor(object); err == nil {
			o.SetManagedFields(nil) // most of the object, and nobody reads it
		}
		return object, nil
	})
}

// indexed returns the objects under a key of an index.
func indexed[T any](i cache.SharedIndexInformer, index, key string) []T {
	found, err := i.GetIndexer().ByIndex(index, key)
	if err != nil { // no such index
		return nil
	}
	all := make([]T, 0, len(found))
	for _, object := range found {
		if o, ok := object.(T); ok {
			all = append(all, o)
		}
	}
	return all
}

// run works until ctx ends.
func (c *controller) run(ctx context.Context) error {
	ctx, stop := context.WithCancel(logr.NewContext(ctx, zapr.NewLogger(c.log.Named("client-go")))) // not klog
	defer c.waiting.Wait()
	defer stop()
	c.waits = map[types.UID]*wait{}
	syncs, err := runner.New(runner.Options{}, func(context.Context) (next time.Time, err error) {
		err = c.sync(ctx) // whose waits outlive it
		if err != nil && ctx.Err() == nil {
			c.log.Warn("sync failed, it is retried", zap.Error(err))
		}
		return time.Time{}, err
	})
	if err != nil {
		return err
	}
	for _, i := range []cache.SharedIndexInformer{c.pods, c.services, c.slices} {
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { syncs.Trigger() },
			UpdateFunc: func(any, any) { syncs.Trigger() },
			DeleteFunc: func(any) { syncs.Trigger() },
		}); err != nil {
			return err
		}
		c.waiting.Go(func() { i.RunWithContext(ctx) })
	}
	if !cache.WaitForCacheSync(ctx.Done(), c.pods.HasSynced, c.services.HasSynced, c.slices.HasSynced) {
		return nil
	}
	return syncs.Run(ctx)
}

// plan is what the pods need.
type plan struct {
	slices map[string]*discovery.EndpointSlice // by namespace/name
	waits  map[types.UID]*wait
}

func key(s *discovery.EndpointSlice) string { return s.Namespace + "/" + s.Name }

// sync makes our EndpointSlices those of the plan, and has the pods wait that must.
func (c *controller) sync(ctx context.Context) error {
	p := plan{slices: map[string]*discovery.EndpointSlice{}, waits: map[types.UID]*wait{}}
	for _, pod := range indexed[*v1.Pod](c.pods, gated, "") {
		if canServe(pod, c.gate) {
			c.plan(pod, &p)
		}
	}
	c.keepWaiting(ctx, p.waits) // first: a pod whose EndpointSlice goes may not become ready
	var errs []error
	for _, have := range indexed[*discovery.EndpointSlice](c.slices, ours, "") {
		if want := p.slices[key(have)]; want == nil || !same(have, want) {
			errs = append(errs, c.remove(ctx, have)) // and then its removal is heard, and it is published again
		}
	}
	for _, want := range p.slices {
		if c.published(want) == nil {
			errs = append(errs, c.publish(ctx, want))
		}
	}
	return errors.Join(errs...)
}

// plan adds what a pod needs. Before its gate is open: an EndpointSlice for each Service and
// family, and a wait for all nodes when they are all published. Later: those that it still has,
// until another EndpointSlice has the pod as ready.
func (c *controller) plan(pod *v1.Pod, p *plan) {
	open, w, complete := isTrue(pod, c.gate), &wait{pod: pod}, true
	for _, s := range indexed[*v1.Service](c.services, ofNamespace, pod.Namespace) {
		if !selects(s, pod) {
			continue
		}
		for _, family := range s.Spec.IPFamilies {
			want := sliceOf(s, pod, family)
			if want == nil {
				continue
			}
			have := c.published(want)
			if open && (have == nil || c.elsewhere(want)) {
				continue
			}
			p.slices[key(want)] = want
			if have == nil || !same(have, want) {
				complete = false
				continue
			}
			w.changes = append(w.changes, programmed.ServiceChange{
				Service:  types.NamespacedName{Namespace: s.Namespace, Name: s.Name},
				Versions: changetracker.Versions{Services: s.ResourceVersion, EndpointSlices: have.ResourceVersion},
				Joined:   endpointsOf(have),
			})
		}
	}
	if !open && complete {
		slices.SortFunc(w.changes, func(a, b programmed.ServiceChange) int { // as the index has no order
			return cmp.Or(cmp.Compare(a.Service.Name, b.Service.Name), cmp.Compare(a.Versions.EndpointSlices, b.Versions.EndpointSlices))
		})
		p.waits[pod.UID] = w
	}
}

// published returns one of our EndpointSlices as the API server has it, or nil.
func (c *controller) published(s *discovery.EndpointSlice) *discovery.EndpointSlice {
	object, _, err := c.slices.GetIndexer().GetByKey(key(s))
	have, ok := object.(*discovery.EndpointSlice)
	if err != nil || !ok {
		return nil
	}
	return have
}

// elsewhere reports whether an EndpointSlice that is not ours has the pod as ready.
func (c *controller) elsewhere(own *discovery.EndpointSlice) bool {
	all := indexed[*discovery.EndpointSlice](c.slices, ofService, own.Namespace+"/"+own.Labels[discovery.LabelServiceName])
	return slices.ContainsFunc(all, func(s *discovery.EndpointSlice) bool { return !isOurs(s) && hasReady(s, own) })
}

// same reports whether an EndpointSlice says what it should.
func same(have, want *discovery.EndpointSlice) bool {
	return have.AddressType == want.AddressType && equality.Semantic.DeepEqual(have.Endpoints, want.Endpoints) && equality.Semantic.DeepEqual(have.Ports, want.Ports)
}

func (c *controller) publish(ctx context.Context, s *discovery.EndpointSlice) error {
	err := c.discovery.Post().Namespace(s.Namespace).Resource("endpointslices").Body(s).Do(ctx).Error()
	if err == nil || apierrors.IsAlreadyExists(err) { // it was published, and we shall hear it
		return nil
	}
	return fmt.Errorf("create EndpointSlice %s: %w", key(s), err)
}

func (c *controller) remove(ctx context.Context, s *discovery.EndpointSlice) error {
	only := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}}
	err := c.discovery.Delete().Namespace(s.Namespace).Resource("endpointslices").Name(s.Name).Body(&only).Do(ctx).Error()
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // it is gone, or is another one now
		return nil
	}
	return fmt.Errorf("delete EndpointSlice %s: %w", key(s), err)
}

func sameChange(a, b programmed.ServiceChange) bool {
	return a.Service == b.Service && a.Versions == b.Versions
}

// keepWaiting stops the waits that are over or for other changes, and begins those that are new.
func (c *controller) keepWaiting(ctx context.Context, wanted map[types.UID]*wait) {
	for uid, w := range c.waits {
		select {
		case <-w.ended:
		default:
			if want := wanted[uid]; want != nil && slices.EqualFunc(want.changes, w.changes, sameChange) {
				continue
			}
		}
		w.stop()
		delete(c.waits, uid)
	}
	for uid, w := range wanted {
		if c.waits[uid] != nil {
			continue
		}
		waiting, stop := context.WithCancel(ctx)
		ended := make(chan struct{})
		w.stop, w.ended, c.waits[uid] = stop, ended, w
		c.waiting.Go(func() {
			defer close(ended)
			c.open(waiting, w)
		})
	}
}

// open sets the condition of a pod when all nodes have its EndpointSlices. Until then it reports,
// from time to time, which nodes are behind.
func (c *controller) open(ctx context.Context, w *wait) {
	began := time.Now()
	for ctx.Err() == nil {
		attempt, stop := context.WithTimeout(ctx, c.reportAfter)
		behind := c.reached(attempt, w.changes)
		if behind != nil {
			<-attempt.Done() // a change that cannot be waited for is an error at once
		}
		stop()
		if ctx.Err() != nil {
			return
		}
		if behind != nil {
			c.log.Warn("pod is not ready yet: not every node can reach it", zap.String("namespace", w.pod.Namespace), zap.String("pod", w.pod.Name),
				zap.Duration("waits", time.Since(began)), zap.Error(behind))
		}
		err := c.tell(ctx, w.pod, behind)
		switch {
		case apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err): // the pod is gone, or is another one
			return
		case err != nil && ctx.Err() == nil:
			c.log.Warn("set condition of pod failed, it is retried", zap.String("namespace", w.pod.Namespace), zap.String("pod", w.pod.Name), zap.Error(err))
			pause(ctx)
		case behind == nil:
			return
		}
	}
}

// reached waits until all nodes have some changes.
func (c *controller) reached(ctx context.Context, changes []programmed.ServiceChange) error {
	for _, change := range changes {
		if err := programmed.Wait(ctx, c.all, change); err != nil {
			return fmt.Errorf("service %s: %w", change.Service, err)
		}
	}
	return nil
}

// pause waits before a request is sent again.
func pause(ctx context.Context) {
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
}

// tell sets the condition of a pod: True if no node is behind. False is only a message: it is not
// written if the pod has changed meanwhile, perhaps by another controller of this kind.
func (c *controller) tell(ctx context.Context, p *v1.Pod, behind error) error {
	metadata := map[string]any{"uid": p.UID} // a pod of the same name is another one
	condition := map[string]any{"type": c.gate, "status": v1.ConditionTrue, "reason": "Programmed", "message": "every node can reach the pod"}
	isNew := true
	if behind != nil {
		object, _, _ := c.pods.GetIndexer().GetByKey(p.Namespace + "/" + p.Name) // no error is possible
		latest, ok := object.(*v1.Pod)
		if !ok || isTrue(latest, c.gate) {
			return nil
		}
		metadata["resourceVersion"] = latest.ResourceVersion
		condition["status"], condition["reason"], condition["message"] = v1.ConditionFalse, "NodesBehind", behind.Error()
		isNew = !slices.ContainsFunc(latest.Status.Conditions, func(have v1.PodCondition) bool { return have.Type == c.gate })
	}
	if isNew {
		condition["lastTransitionTime"] = metav1.Now()
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata, "status": map[string]any{"conditions": []any{condition}}})
	if err != nil {
		return err
	}
	err = c.core.Patch(types.StrategicMergePatchType).Namespace(p.Namespace).Resource("pods").Name(p.Name).SubResource("status").Body(patch).Do(ctx).Error()
	if behind != nil && apierrors.IsConflict(err) {
		return nil
	}
	return err
}
