package informer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// Run feeds a Provider from informers of its own until ctx ends, and returns nil
// after all of their goroutines have ended. The API server sends only what
// matters: Services that have a ClusterIP and the right label, EndpointSlices that
// belong to no headless Service, and one Node.
//
// An API server that cannot be reached is no error: the Provider keeps what it
// has, and Run tries again. Meanwhile the end of ctx may be noticed late, by up to
// a minute: client-go 0.37 sits out its pause between two attempts to watch.
func Run(ctx context.Context, client kubernetes.Interface, p proxier.EventHandler, o Options) error {
	o = o.withDefaults()
	own := &ownInformers{client: client, options: o}
	s := sources{
		services: own.factory(servicesOf(o.ServiceProxyName)).Core().V1().Services().Informer(),
		slices:   own.factory(labelled("!" + v1.IsHeadlessService)).Discovery().V1().EndpointSlices().Informer(),
		cidrs:    own.factory(nil).Networking().V1().ServiceCIDRs().Informer(),
	}
	if o.nodeName() != "" {
		s.nodes = own.factory(named(o.nodeName())).Core().V1().Nodes().Informer()
	}
	if err := own.prepare(s); err != nil {
		return err
	}
	stop, err := bind(s, p, o)
	if err != nil {
		return err
	}
	for _, f := range own.factories {
		f.StartWithContext(o.clientLogs(ctx))
	}
	<-ctx.Done()
	stop()
	for _, f := range own.factories {
		f.Shutdown()
	}
	return nil
}

// ownInformers are one factory for each selection of objects.
type ownInformers struct {
	client    kubernetes.Interface
	options   Options
	factories []informers.SharedInformerFactory
}

func (i *ownInformers) factory(selection func(*metav1.ListOptions)) informers.SharedInformerFactory {
	f := informers.NewSharedInformerFactoryWithOptions(i.client, i.options.resync(),
		informers.WithTweakListOptions(selection), informers.WithTransform(slim))
	i.factories = append(i.factories, f)
	return f
}

// prepare makes the informers report to our logger.
func (i *ownInformers) prepare(s sources) error {
	for kind, informer := range map[string]cache.SharedIndexInformer{
		kindServices: s.services, kindSlices: s.slices, kindCIDRs: s.cidrs, kindNodes: s.nodes,
	} {
		if informer == nil {
			continue
		}
		c := &complaints{log: i.options.Logger, kind: kind, linked: i.options.Link != nil}
		if err := informer.SetWatchErrorHandlerWithContext(c.hear); err != nil {
			return fmt.Errorf("watch %s: %w", kind, err)
		}
	}
	return nil
}

func servicesOf(proxyName string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) {
		o.LabelSelector = "!" + changetracker.LabelServiceProxyName
		if proxyName != "" {
			o.LabelSelector = changetracker.LabelServiceProxyName + "=" + proxyName
		}
		o.FieldSelector = fields.OneTermNotEqualSelector("spec.clusterIP", v1.ClusterIPNone).String()
	}
}

func labelled(selector string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.LabelSelector = selector }
}

func named(name string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
}

// slim drops what no proxy reads before it is stored.
func slim(object any) (any, error) {
	if o, err := meta.Accessor(object); err == nil {
		o.SetManagedFields(nil)
	}
	if node, ok := object.(*v1.Node); ok {
		node.Status.Images = nil
	}
	return object, nil
}

// complaints are the errors of one informer. client-go tries again and again: the
// same error is worth one line, until it has not been heard for a while.
type complaints struct {
	log    *zap.Logger
	kind   string
	linked bool // a Link says what concerns the API server as a whole

	mu    sync.Mutex
	last  string    // guarded by mu
	heard time.Time // guarded by mu
}

// forgiven is how long an error stays away that is over. client-go tries again
// within a minute.
const forgiven = 5 * time.Minute

func (c *complaints) hear(_ context.Context, _ *cache.Reflector, err error) {
	if errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // a watch ends now and then, and is too old after a pause
	}
	if c.linked && saidByLink(err) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	known := err.Error() == c.last && time.Since(c.heard) < forgiven
	c.last, c.heard = err.Error(), time.Now()
	if !known {
		c.log.Warn("the API server cannot be watched, will be tried again", zap.String("objects", c.kind), zap.Error(err))
	}
}

// saidByLink tells what the transport has said from what is wrong with one kind of
// objects.
func saidByLink(err error) bool {
	if status, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return refused(int(status.ErrStatus.Code))
	}
	_, ok := errors.AsType[*url.Error](err)
	return ok || errors.Is(err, context.DeadlineExceeded)
}
