package main

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

const testPool = "198.19.0.0/24,2001:db8:19::/64"

// cluster is an API server with the Gateway API's CRDs.
type cluster struct {
	*apitest.Server
	tb     testing.TB
	client dynamic.Interface
	config *rest.Config
}

// newCluster starts a server, which also calls seen, if not nil, with each object that a client
// writes.
func newCluster(tb testing.TB, seen func(before, after *unstructured.Unstructured) error, more ...apitest.Resource) *cluster {
	tb.Helper()
	resources := append([]apitest.Resource{{GroupVersionKind: v1.SchemeGroupVersion.WithKind("Namespace"), Name: "namespaces"}}, more...)
	for _, r := range crds(tb) {
		resources = append(resources, r.Resource)
	}
	valid := admit(tb)
	c := &cluster{tb: tb, Server: apitest.New(tb, apitest.Options{Resources: resources, Admit: func(before, after *unstructured.Unstructured) error {
		err := valid(before, after)
		if err == nil && seen != nil {
			err = seen(before, after)
		}
		return err
	}})}
	c.config = &rest.Config{Host: c.URL(), ContentConfig: rest.ContentConfig{ContentType: "application/json"}, QPS: -1}
	client, err := dynamic.NewForConfig(c.config)
	if err != nil {
		tb.Fatal(err)
	}
	c.client = client
	return c
}

// kind returns the client for objects of a kind of the Gateway API, or for Namespaces.
func (c *cluster) kind(kind, namespace string) dynamic.ResourceInterface {
	all := map[string]schema.GroupVersionResource{"Namespace": v1.SchemeGroupVersion.WithResource("namespaces")}
	for k, r := range crds(c.tb) {
		all[k.Kind] = k.GroupVersion().WithResource(r.Name)
	}
	if namespace == "" {
		return c.client.Resource(all[kind])
	}
	return c.client.Resource(all[kind]).Namespace(namespace)
}

// apply creates objects, or replaces all but their status.
func (c *cluster) apply(text string) {
	c.tb.Helper()
	for decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096); ; {
		o := &unstructured.Unstructured{}
		if err := decoder.Decode(&o.Object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			c.tb.Fatal(err)
		}
		client := c.kind(o.GetKind(), o.GetNamespace())
		_, err := client.Create(c.tb.Context(), o, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			_, err = client.Update(c.tb.Context(), o, metav1.UpdateOptions{})
		}
		if err != nil {
			c.tb.Fatalf("apply %s %s: %v", o.GetKind(), o.GetName(), err)
		}
	}
}

// remove deletes an object.
func (c *cluster) remove(kind, namespace, name string) {
	c.tb.Helper()
	if err := c.kind(kind, namespace).Delete(c.tb.Context(), name, metav1.DeleteOptions{}); err != nil {
		c.tb.Fatal(err)
	}
}

// read reads an object into a typed one.
func (c *cluster) read(namespace, name string, into interface{ GetObjectKind() schema.ObjectKind }, kind string) {
	c.tb.Helper()
	o, err := c.kind(kind, namespace).Get(c.tb.Context(), name, metav1.GetOptions{})
	if err == nil {
		err = runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, into)
	}
	if err != nil {
		c.tb.Fatal(err)
	}
}

// awaitRoute waits until the status of a route is that of its spec, and the condition has the
// reason. The program writes it after the rules are in the kernel.
func (c *cluster) awaitRoute(kind, name string, condition gw.RouteConditionType, reason gw.RouteConditionReason) {
	c.tb.Helper()
	poll.Until(c.tb, kind+" "+name+": "+string(condition)+" has reason "+string(reason), func() bool {
		route := &gw.TCPRoute{} // a UDPRoute has the same fields
		c.read("apps", name, route, kind)
		for _, p := range route.Status.Parents {
			for _, found := range p.Conditions {
				if found.Type == string(condition) && found.Reason == string(reason) && found.ObservedGeneration == route.Generation {
					return true
				}
			}
		}
		return false
	})
}

// awaitGateway waits until the Gateway edge is programmed with so many attached routes in all.
func (c *cluster) awaitGateway(routes int32) *gw.Gateway {
	c.tb.Helper()
	var g *gw.Gateway
	poll.Until(c.tb, "Gateway edge is programmed", func() bool {
		g = &gw.Gateway{}
		c.read("apps", "edge", g, "Gateway")
		attached := int32(0)
		for _, l := range g.Status.Listeners {
			attached += l.AttachedRoutes
		}
		for _, found := range g.Status.Conditions {
			if found.Type == string(gw.GatewayConditionProgrammed) {
				return attached == routes && found.Status == metav1.ConditionTrue && found.ObservedGeneration == g.Generation
			}
		}
		return false
	})
	return g
}

// stage is a cluster, and the program on the node of a test network.
type stage struct {
	*cluster
	world *proxiertest.Topology
}

// newStage starts the program.
func newStage(t *testing.T) *stage {
	t.Helper()
	c := newCluster(t, nil)
	return startStage(t, c, c.config)
}

// startStage starts the program with a configuration of its own for the API server.
func startStage(t *testing.T, c *cluster, config *rest.Config) *stage {
	t.Helper()
	s := &stage{cluster: c, world: proxiertest.NewTopology(t)}
	s.apply(gatewayGroup + "kind: GatewayClass\nmetadata: {name: test}\nspec: {controllerName: " + string(testController) + "}")
	pool, err := parsePool(testPool)
	if err != nil {
		t.Fatal(err)
	}
	settings := settings{controller: testController, pool: pool}
	var release func()
	if err := s.world.Node.Do(func() (err error) {
		settings.refusing, release, err = reserve(pool)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		if err := run(ctx, config, settings, s.world.Config(), zap.NewNop()); err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(func() {
		stop()
		running.Wait()
		release()
	})
	return s
}

// backend makes a Service, and its endpoints of both families in a slice for each.
func (s *stage) backend(namespace, name string, pods ...*proxiertest.Host) {
	s.tb.Helper()
	for family, kind := range map[v1.IPFamily]discovery.AddressType{v1.IPv4Protocol: discovery.AddressTypeIPv4, v1.IPv6Protocol: discovery.AddressTypeIPv6} {
		options := []proxiertest.SliceOption{
			proxiertest.SliceName(name + "-" + strings.ToLower(string(family))),
			proxiertest.SlicePort("tcp", v1.ProtocolTCP, 8080), proxiertest.SlicePort("udp", v1.ProtocolUDP, 8080),
		}
		for _, pod := range pods {
			options = append(options, proxiertest.Endpoint(pod.Addr(family).String()))
		}
		s.Put(s.tb, proxiertest.Slice(namespace, name, kind, options...))
	}
	s.Put(s.tb, proxiertest.Service(namespace, name, proxiertest.Port("tcp", v1.ProtocolTCP, 80), proxiertest.Port("udp", v1.ProtocolUDP, 80)))
}

// frontends calls f for TCP and UDP of the Gateway's addresses of both families.
func (s *stage) frontends(t *testing.T, g *gw.Gateway, port uint16, f func(t *testing.T, network string, to netip.AddrPort)) {
	t.Helper()
	if len(g.Status.Addresses) != 2 {
		t.Fatalf("addresses %v, want one of each family", g.Status.Addresses)
	}
	for _, a := range g.Status.Addresses {
		to := netip.AddrPortFrom(netip.MustParseAddr(a.Value), port)
		for _, network := range []string{"tcp", "udp"} {
			t.Run(network+" "+string(familyOf(to.Addr())), func(t *testing.T) { f(t, network, to) })
		}
	}
}

// ask opens connections and counts who answers. "refused" stands for a refusal.
func (s *stage) ask(t *testing.T, network string, to netip.AddrPort, times int) map[string]int {
	t.Helper()
	answers := map[string]int{}
	for range times {
		answer, err := s.world.Client.Ask(t.Context(), network, to, proxiertest.AskOptions{})
		switch {
		case err == nil:
			answers[answer.Server]++
		case errors.Is(err, proxiertest.ErrRefused):
			answers["refused"]++
		default:
			t.Fatalf("%s %s: %v", network, to, err)
		}
	}
	return answers
}

// quiet is how long a test waits for an answer that must not come.
const quiet = 300 * time.Millisecond

// awaitBothDetached waits until the status of the routes "b" names no parent.
func (s *stage) awaitBothDetached(t *testing.T) {
	t.Helper()
	for _, kind := range []gw.Kind{kindTCPRoute, kindUDPRoute} {
		poll.Until(t, string(kind)+" b has no parent", func() bool {
			route := &gw.TCPRoute{}
			s.read("apps", "b", route, string(kind))
			return len(route.Status.Parents) == 0
		})
	}
}
