package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/metrics"
	"github.com/serviceplane/serviceplane/proxier"
)

// apiSource follows the API server.
func (o *options) apiSource(node string, p proxier.Provider, m *metrics.Metrics, log *zap.Logger) (func(context.Context) error, error) {
	config, err := o.restConfig()
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	link := informer.NewLink(informer.LinkOptions{Logger: log})
	link.Attach(config)
	m.WatchAPIServer(link.Reachable)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("find the API server: %w", err)
	}
	watch := informer.Options{NodeName: node, Resync: o.configSyncPeriod, Link: link, Logger: log}
	return func(ctx context.Context) error {
		return leaveSoon(ctx, func() error {
			var event sync.WaitGroup
			event.Go(func() { writeEvent(ctx, client, node, log) })
			defer event.Wait()
			return informer.Run(ctx, client, p, watch)
		})
	}, nil
}

// farewell is how long the client may take to end.
const farewell = 300 * time.Millisecond

// leaveSoon runs f, and does not wait long for it after the end of ctx. An informer
// whose API server is away sits out a pause of up to a minute (Reflector.watchList
// of client-go 0.37 does not look at its context then); the process ends before.
func leaveSoon(ctx context.Context, f func() error) error {
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
	case <-time.After(farewell):
		return nil
	}
}

// restConfig says where the API server is: where the flags say, or else where the
// pod that we are in has its own.
func (o *options) restConfig() (*rest.Config, error) {
	config, err := o.locate()
	if err != nil {
		return nil, err
	}
	// Protobuf is several times cheaper than JSON, which every server knows.
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	return config, nil
}

func (o *options) locate() (*rest.Config, error) {
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
