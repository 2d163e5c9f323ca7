// Package apiclient makes clients of an API server for the few resources that this module
// knows, without those of all API groups.
package apiclient

import (
	"cmp"
	"fmt"
	"net/http"

	coordination "k8s.io/api/coordination/v1"
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

// Clients makes clients of one API server. They share connections and a rate limit.
type Clients struct {
	config *rest.Config
	http   *http.Client
}

// New returns Clients that send as a configuration says. Answers are protobuf, or JSON of a server without
// it, unless AcceptContentTypes says otherwise: JSON costs several times more on both sides.
func New(config *rest.Config) (Clients, error) {
	config = rest.CopyConfig(config)
	config.UserAgent = cmp.Or(config.UserAgent, rest.DefaultKubernetesUserAgent())
	config.AcceptContentTypes = cmp.Or(config.AcceptContentTypes, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON)
	if config.RateLimiter == nil && config.QPS >= 0 { // negative means no limit
		config.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(cmp.Or(config.QPS, rest.DefaultQPS), cmp.Or(config.Burst, rest.DefaultBurst))
	}
	scheme := runtime.NewScheme()
	types := runtime.NewSchemeBuilder(v1.AddToScheme, discovery.AddToScheme, networking.AddToScheme, coordination.AddToScheme)
	if err := types.AddToScheme(scheme); err != nil {
		return Clients{}, fmt.Errorf("register types: %w", err)
	}
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	client, err := rest.HTTPClientFor(config)
	return Clients{config: config, http: client}, err
}

// For returns the client of a group.
func (c Clients) For(group schema.GroupVersion) (*rest.RESTClient, error) {
	config := rest.CopyConfig(c.config)
	config.GroupVersion, config.APIPath = &group, "/apis"
	if group.Group == "" {
		config.APIPath = "/api"
	}
	return rest.RESTClientForConfigAndClient(config, c.http)
}

// Source lists and watches a resource of a namespace, or of all.
func (c Clients) Source(group schema.GroupVersion, resource, namespace string, selection func(*metav1.ListOptions)) (cache.ListerWatcher, error) {
	client, err := c.For(group)
	if err != nil {
		return nil, err
	}
	return cache.NewFilteredListWatchFromClient(client, resource, namespace, selection), nil
}

// Untyped is a client of resources without Go types.
func (c Clients) Untyped() (dynamic.Interface, error) {
	return dynamic.NewForConfigAndClient(c.config, c.http)
}
