package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
	"github.com/serviceplane/serviceplane/node/programmed"
)

// cluster finds the proxies of all nodes: pods that the API server forwards requests to.
type cluster struct {
	kubeconfig, context string
	namespace, selector string
	port                int
	nodeSelector        string
	notReadyFor         time.Duration
}

// plugin returns the command that asks the nodes of a cluster.
func plugin() *cobra.Command {
	const debugPort = 10290
	c := &cluster{}
	command := spctl.New(spctl.Options{Use: "kubectl-serviceplane", Nodes: c.nodes, Awaited: c.awaited, Versions: c.versions})
	command.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl serviceplane"}
	flags := command.PersistentFlags()
	flags.StringVar(&c.kubeconfig, "kubeconfig", "", "kubeconfig file; default is $KUBECONFIG, or ~/.kube/config")
	flags.StringVar(&c.context, "context", "", "context of the kubeconfig")
	flags.StringVar(&c.namespace, "proxy-namespace", "kube-system", "namespace of the proxies' pods")
	flags.StringVarP(&c.selector, "selector", "l", "app.kubernetes.io/name=nodeproxy", "label selector of the proxies' pods")
	flags.IntVar(&c.port, "proxy-port", debugPort, "port of the proxies' debug server, which listens on the pods' addresses")
	flags.StringVar(&c.nodeSelector, "node-selector", "", "wait: labels of the nodes that run the proxy; default is all nodes")
	flags.DurationVar(&c.notReadyFor, "ignore-not-ready-for", 0, "wait: leave out nodes that are not Ready for this long; 0 waits for them too, because they may still send connections")
	return command
}

// awaited lists the nodes that must have a change, whether they have a pod of the proxy or not.
func (c *cluster) awaited(ctx context.Context) (names []string, err error) {
	policy := programmed.NodePolicy{NotReadyFor: c.notReadyFor}
	if policy.Selector, err = labels.Parse(c.nodeSelector); err != nil {
		return nil, fmt.Errorf("--node-selector=%s: %w", c.nodeSelector, err)
	}
	base, transport, err := c.connect()
	if err != nil {
		return nil, err
	}
	var list v1.NodeList
	if err := get(ctx, transport, *base.JoinPath("api/v1/nodes"), url.Values{"resourceVersion": {"0"}}, &list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		if policy.Counts(&list.Items[i], time.Now()) {
			names = append(names, list.Items[i].Name)
		}
	}
	return names, nil
}

// connect returns the address of the API server, and how to reach it.
func (c *cluster) connect() (base *url.URL, transport http.RoundTripper, err error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = c.kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: c.context}).ClientConfig()
	if err != nil {
		return nil, nil, fmt.Errorf("load kubeconfig: %w", err)
	}
	if base, _, err = rest.DefaultServerUrlFor(config); err != nil {
		return nil, nil, fmt.Errorf("read the API server's address: %w", err)
	}
	if transport, err = rest.TransportFor(config); err != nil {
		return nil, nil, fmt.Errorf("connect to the API server: %w", err)
	}
	return base, transport, nil
}

// nodes lists the pods of the proxies.
func (c *cluster) nodes(ctx context.Context) ([]spctl.NodeProxy, error) {
	base, transport, err := c.connect()
	if err != nil {
		return nil, err
	}
	pods := base.JoinPath("api/v1/namespaces", c.namespace, "pods")
	var list v1.PodList
	if err := get(ctx, transport, *pods, url.Values{"labelSelector": {c.selector}}, &list); err != nil {
		return nil, fmt.Errorf("list pods of %s: %w", c.namespace, err)
	}
	if len(list.Items) == 0 {
		return nil, fmt.Errorf("no pod in %s has the labels %s: see --selector and --proxy-namespace", c.namespace, c.selector)
	}
	slices.SortStableFunc(list.Items, func(a, b v1.Pod) int { // those that end come last
		return ends(&a) - ends(&b)
	})
	toPods := &http.Client{Transport: forPods{transport}}
	all := make([]spctl.NodeProxy, 0, len(list.Items))
	for i := range list.Items {
		pod := &list.Items[i]
		node := spctl.NodeProxy{Name: pod.Spec.NodeName, Client: toPods, Address: pods.JoinPath(pod.Name+":"+strconv.Itoa(c.port), "proxy").String()}
		if pod.Status.Phase != v1.PodRunning {
			node.Err = fmt.Errorf("pod %s is %s", pod.Name, pod.Status.Phase)
		}
		all = append(all, node)
	}
	return all, nil
}

// ends is 1 for a pod that ends, which an update has replaced or will.
func ends(pod *v1.Pod) int {
	if pod.DeletionTimestamp != nil {
		return 1
	}
	return 0
}

// versions returns the resourceVersion of a Service, and the newest one of its EndpointSlices.
func (c *cluster) versions(ctx context.Context, namespace, name string) (services, endpointSlices string, err error) {
	base, transport, err := c.connect()
	if err != nil {
		return "", "", err
	}
	var service v1.Service
	if err := get(ctx, transport, *base.JoinPath("api/v1/namespaces", namespace, "services", name), nil, &service); err != nil {
		return "", "", err
	}
	var list discovery.EndpointSliceList
	ofService := base.JoinPath("apis/discovery.k8s.io/v1/namespaces", namespace, "endpointslices")
	if err := get(ctx, transport, *ofService, url.Values{"labelSelector": {discovery.LabelServiceName + "=" + name}}, &list); err != nil {
		return "", "", err
	}
	for i := range list.Items {
		version := list.Items[i].ResourceVersion
		if order, err := resourceversion.CompareResourceVersion(cmp.Or(endpointSlices, version), version); err != nil {
			return "", "", fmt.Errorf("EndpointSlice %s: %w", list.Items[i].Name, err)
		} else if order <= 0 {
			endpointSlices = version
		}
	}
	return service.ResourceVersion, endpointSlices, nil
}

// get decodes an object of the API server.
func get(ctx context.Context, transport http.RoundTripper, at url.URL, query url.Values, into any) error {
	at.RawQuery = query.Encode()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), http.NoBody)
	if err != nil {
		return err
	}
	request.Header.Set("Accept", "application/json")
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, content)
	}
	return json.Unmarshal(content, into)
}

// forPods sets a Host that debughttp accepts: the API server passes the client's own on to the
// pod, which is the API server's name.
type forPods struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (t forPods) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Host = "localhost"
	return t.RoundTripper.RoundTrip(r)
}
