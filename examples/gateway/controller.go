package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	gw "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/gateway-api/pkg/client/clientset/versioned"
	gwclient "sigs.k8s.io/gateway-api/pkg/client/clientset/versioned/typed/apis/v1"
	gwinformers "sigs.k8s.io/gateway-api/pkg/client/informers/externalversions"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/runner"
)

// controller makes a plan of all objects whenever one has changed, programs it, and then
// writes the statuses.
type controller struct {
	settings
	core    informers.SharedInformerFactory
	gateway gwinformers.SharedInformerFactory
	client  gwclient.GatewayV1Interface
	proxy   *proxier.Proxier
	known   plannedServices
}

// plannedServices are the services of the last plan.
type plannedServices struct {
	ports     map[types.NamespacedName][]changetracker.ServicePort
	endpoints map[changetracker.ServicePortName][]changetracker.Endpoint
}

// run serves the Gateways until ctx ends.
func run(ctx context.Context, api *rest.Config, s settings, config proxier.Config, log *zap.Logger) error {
	config.Names, _ = proxier.NamesFor("gateway")
	proxy, err := nftables.New(nftables.Config{Config: config}, proxier.Deps{Logger: log})
	if err != nil {
		return err
	}
	core, err := kubernetes.NewForConfig(api)
	if err != nil {
		return err
	}
	client, err := versioned.NewForConfig(api)
	if err != nil {
		return err
	}
	c := &controller{
		settings: s, proxy: proxy, client: client.GatewayV1(),
		core: informers.NewSharedInformerFactory(core, 0), gateway: gwinformers.NewSharedInformerFactory(client, 0),
	}
	syncs, err := runner.New(runner.Options{}, func(ctx context.Context) (next time.Time, err error) {
		err = c.sync(ctx)
		if err != nil && ctx.Err() == nil {
			log.Warn("sync failed, it is retried", zap.Error(err))
		}
		return time.Time{}, err
	})
	if err != nil {
		return err
	}
	for _, i := range c.informers() {
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
			AddFunc:    func(any, bool) { syncs.Trigger() },
			UpdateFunc: func(any, any) { syncs.Trigger() },
			DeleteFunc: func(any) { syncs.Trigger() },
		}); err != nil {
			return err
		}
	}
	tasks, ctx := errgroup.WithContext(ctx)
	tasks.Go(func() error { return proxy.Run(ctx) })
	c.core.Start(ctx.Done())
	c.gateway.Start(ctx.Done())
	defer c.gateway.Shutdown()
	defer c.core.Shutdown()
	c.core.WaitForCacheSync(ctx.Done()) // without all objects, a plan would cut connections
	c.gateway.WaitForCacheSync(ctx.Done())
	tasks.Go(func() error { return syncs.Run(ctx) })
	return tasks.Wait()
}

func (c *controller) informers() []cache.SharedIndexInformer {
	g := c.gateway.Gateway().V1()
	return []cache.SharedIndexInformer{
		g.GatewayClasses().Informer(), g.Gateways().Informer(), g.TCPRoutes().Informer(), g.UDPRoutes().Informer(), g.ReferenceGrants().Informer(),
		c.core.Core().V1().Namespaces().Informer(), c.core.Core().V1().Services().Informer(), c.core.Discovery().V1().EndpointSlices().Informer(),
	}
}

// objects returns all objects that the informers have.
func (c *controller) objects() (o *objects, err error) {
	o, g := &objects{}, c.gateway.Gateway().V1()
	var errs [8]error
	all := labels.Everything()
	o.classes, errs[0] = g.GatewayClasses().Lister().List(all)
	o.gateways, errs[1] = g.Gateways().Lister().List(all)
	o.tcpRoutes, errs[2] = g.TCPRoutes().Lister().List(all)
	o.udpRoutes, errs[3] = g.UDPRoutes().Lister().List(all)
	o.grants, errs[4] = g.ReferenceGrants().Lister().List(all)
	o.namespaces, errs[5] = c.core.Core().V1().Namespaces().Lister().List(all)
	o.services, errs[6] = c.core.Core().V1().Services().Lister().List(all)
	o.slices, errs[7] = c.core.Discovery().V1().EndpointSlices().Lister().List(all)
	return o, errors.Join(errs[:]...)
}

func (c *controller) sync(ctx context.Context) error {
	objects, err := c.objects()
	if err != nil {
		return err
	}
	p := newPlan(objects, c.settings)
	failed, err := c.program(ctx, p)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return errors.Join(err, c.write(ctx, p, failed))
}

// program passes the Services to the proxy, and waits until they are in the kernel.
func (c *controller) program(ctx context.Context, p *plan) (failures, error) {
	var next plannedServices
	next.ports, next.endpoints = p.services()
	tracker, failed := c.proxy.Tracker(), failures{}
	for name, ports := range next.ports {
		if _, err := tracker.Services.Set(name, ports...); err != nil {
			failed.add(err, ports)
		}
	}
	for name, endpoints := range next.endpoints {
		if _, err := tracker.Endpoints.Set(name, endpoints...); err != nil {
			failed[name] = err
		}
	}
	for name := range c.known.ports {
		if _, ok := next.ports[name]; !ok {
			tracker.Services.Delete(name)
		}
	}
	for name := range c.known.endpoints {
		if _, ok := next.endpoints[name]; !ok {
			_, _ = tracker.Endpoints.Set(name) // no endpoints are never invalid
		}
	}
	c.known = next
	c.proxy.OnServiceSynced()
	c.proxy.OnEndpointSlicesSynced()
	c.proxy.Trigger()
	invalid := errors.Join(slices.Collect(maps.Values(failed))...)
	err := c.proxy.Sync(ctx)
	if err != nil {
		c.addFailures(failed)
	}
	return failed, errors.Join(invalid, err)
}

// addFailures adds what the last sync of the proxy could not program.
func (c *controller) addFailures(failed failures) {
	for _, family := range c.proxy.Status().Families {
		for _, e := range family.Failed {
			failed[e.Name] = e
		}
		if family.LastError != nil && len(family.Failed) == 0 { // everything failed
			for _, ports := range c.known.ports {
				failed.add(family.LastError, ports)
			}
		}
	}
}

// write writes the statuses that have changed.
func (c *controller) write(ctx context.Context, p *plan, failed failures) error {
	var errs []error
	for _, class := range p.classes {
		next := class.DeepCopy()
		next.Status = classStatus(class)
		errs = append(errs, update(ctx, class, next, c.client.GatewayClasses().UpdateStatus))
	}
	for _, g := range p.gateways {
		next := g.DeepCopy()
		next.Status = p.gatewayStatus(g, failed)
		errs = append(errs, update(ctx, g.Gateway, next, c.client.Gateways(g.Namespace).UpdateStatus))
	}
	for _, r := range p.routes {
		switch old := r.object.(type) {
		case *gw.TCPRoute:
			next := old.DeepCopy()
			next.Status.Parents = r.parents
			errs = append(errs, update(ctx, old, next, c.client.TCPRoutes(old.Namespace).UpdateStatus))
		case *gw.UDPRoute:
			next := old.DeepCopy()
			next.Status.Parents = r.parents
			errs = append(errs, update(ctx, old, next, c.client.UDPRoutes(old.Namespace).UpdateStatus))
		}
	}
	return errors.Join(errs...)
}

// update writes an object's status if it has changed.
func update[T metav1.Object](ctx context.Context, old, next T, write func(context.Context, T, metav1.UpdateOptions) (T, error)) error {
	if equality.Semantic.DeepEqual(old, next) {
		return nil
	}
	if _, err := write(ctx, next, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write status of %T %s/%s: %w", old, old.GetNamespace(), old.GetName(), err)
	}
	return nil
}
