package nodeproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	events "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/internal/pause"
	"github.com/serviceplane/serviceplane/node/programmed/cluster"
	"github.com/serviceplane/serviceplane/proxier"
)

// apiSource returns the task that watches the API server.
func (o *options) apiSource(node string, p proxier.Provider, m *measured, log *zap.Logger) (func(context.Context) error, error) {
	config, err := o.restConfig()
	if err != nil {
		return nil, fmt.Errorf("load API server configuration: %w", err)
	}
	link := informer.NewLink(informer.LinkOptions{Logger: log})
	link.Attach(config)
	config.Wrap(m.client)
	m.sources.APIServer = link.Reachable
	m.Watch(m.sources)
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("load API server configuration: %w", err)
	}
	leases, err := cluster.New(config)
	if err != nil {
		return nil, err
	}
	watch := informer.Options{NodeName: node, ServiceImports: o.serviceImports, Link: link, Logger: log}
	return func(ctx context.Context) error {
		var event sync.WaitGroup
		event.Go(func() { writeEvent(ctx, client, node, log) })
		if o.leaseNamespace != "" {
			event.Go(func() {
				_ = leases.Publish(ctx, cluster.PublishOptions{Node: node, Proxy: p, Namespace: o.leaseNamespace, Logger: log})
			})
		}
		defer event.Wait()
		return informer.Run(ctx, config, p, watch)
	}, nil
}

// restConfig returns the API server of the flags, or else of the service account.
func (o *options) restConfig() (*rest.Config, error) {
	config, err := o.server()
	if err != nil {
		return nil, err
	}
	o.kubeProxy.tuneClient(config)
	return config, nil
}

// lookupTimeout bounds the look-up of the API server's name, whose answer may need the rules of this proxy.
const lookupTimeout = 2 * time.Second

// apiServer returns where the API server is, none if that is unknown.
func (o *options) apiServer(ctx context.Context, log *zap.Logger) (at []netip.AddrPort) {
	if o.manifests != "" || o.cleanup {
		return nil
	}
	config, err := o.server()
	if err != nil {
		return nil // apiSource reports it
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil
	}
	ctx, stop := context.WithTimeout(ctx, lookupTimeout)
	defer stop()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", server.Hostname()) // an address is its own
	if err != nil {
		log.Warn("an external IP may lead this node away from its API server, whose name has no address: use --refuse-external-ips if tenants may write Services",
			zap.String("server", server.Host), zap.Error(err))
	}
	port := cmp.Or(server.Port(), map[string]string{"http": "80", "https": "443"}[server.Scheme])
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil
	}
	for _, addr := range addrs {
		at = append(at, netip.AddrPortFrom(addr.Unmap(), uint16(number)))
	}
	return at
}

func (o *options) server() (*rest.Config, error) {
	if o.kubeconfig == "" && o.master == "" {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("%w (outside of a pod, use --kubeconfig, --master or --manifests)", err)
		}
		return config, nil
	}
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: o.kubeconfig},
		&clientcmd.ConfigOverrides{ClusterInfo: api.Cluster{Server: o.master}}).ClientConfig()
}

// eventRetry is the pause between attempts to write the event.
const eventRetry = 15 * time.Second

// writeEvent writes the event Starting on the Node, as kube-proxy does. It retries until
// the API server answers, and only logs a refusal.
func writeEvent(ctx context.Context, client dynamic.Interface, node string, log *zap.Logger) {
	event, err := startingEvent(node)
	if err != nil {
		log.Warn("event Starting is not written, nothing else needs it", zap.Error(err))
		return
	}
	resource := client.Resource(events.SchemeGroupVersion.WithResource("events")).Namespace(event.GetNamespace())
	for {
		_, err := resource.Create(ctx, event, metav1.CreateOptions{})
		if err == nil || ctx.Err() != nil {
			return
		}
		if errors.As(err, new(apierrors.APIStatus)) {
			log.Warn("event Starting is not written, nothing else needs it", zap.Error(err))
			return
		}
		pause.For(ctx, eventRetry)
	}
}

func startingEvent(node string) (*unstructured.Unstructured, error) {
	now := time.Now()
	event, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&events.Event{
		TypeMeta:   metav1.TypeMeta{APIVersion: events.SchemeGroupVersion.String(), Kind: "Event"},
		ObjectMeta: metav1.ObjectMeta{Name: node + "." + strconv.FormatInt(now.UnixNano(), 16), Namespace: metav1.NamespaceDefault},
		EventTime:  metav1.NewMicroTime(now), Type: v1.EventTypeNormal, Reason: "Starting", Action: "StartNodeproxy", Note: "nodeproxy " + version(),
		ReportingController: "nodeproxy", ReportingInstance: "nodeproxy-" + node,
		// As with kube-proxy: kubectl describe node selects events with the name as UID.
		Regarding: v1.ObjectReference{Kind: "Node", Name: node, UID: types.UID(node)},
	})
	return &unstructured.Unstructured{Object: event}, err
}
