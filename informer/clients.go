package informer

import (
	"cmp"
	"fmt"
	"net/http"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
)

// clients makes clients of one API server. They share connections and a rate limit.
type clients struct {
	config *rest.Config
	http   *http.Client
}

func newClients(config *rest.Config) (clients, error) {
	config = rest.CopyConfig(config)
	config.UserAgent = cmp.Or(config.UserAgent, rest.DefaultKubernetesUserAgent())
	if config.RateLimiter == nil && config.QPS >= 0 { // negative means no limit
		config.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(cmp.Or(config.QPS, rest.DefaultQPS), cmp.Or(config.Burst, rest.DefaultBurst))
	}
	scheme := runtime.NewScheme()
	types := runtime.NewSchemeBuilder(v1.AddToScheme, discovery.AddToScheme, networking.AddToScheme)
	if err := types.AddToScheme(scheme); err != nil {
		return clients{}, fmt.Errorf("register types: %w", err)
	}
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.HTTPClientFor(config)
	return clients{config: config, http: client}, err
}

// source lists and watches a resource of all namespaces.
func (c clients) source(group schema.GroupVersion, resource string, selection func(*metav1.ListOptions)) (cache.ListerWatcher, error) {
	config := rest.CopyConfig(c.config)
	config.GroupVersion, config.APIPath = &group, "/apis"
	if group.Group == "" {
		config.APIPath = "/api"
	}
	client, err := rest.RESTClientForConfigAndClient(config, c.http)
	if err != nil {
		return nil, err
	}
	return cache.NewFilteredListWatchFromClient(client, resource, metav1.NamespaceAll, selection), nil
}

// untyped is a client of resources without Go types.
func (c clients) untyped() (dynamic.Interface, error) {
	return dynamic.NewForConfigAndClient(c.config, c.http)
}
