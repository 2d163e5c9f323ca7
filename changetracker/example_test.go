package changetracker_test

import (
	"errors"
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
)

func exampleService() *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: v1.ServiceSpec{
			ClusterIP: "10.96.0.10",
			Ports:     []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
}

func exampleSlice(addresses ...string) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "web-x7x2p", Labels: map[string]string{discovery.LabelServiceName: "web"},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a}})
	}
	return s
}

func addresses(endpoints []changetracker.Endpoint) (texts []string) {
	for _, e := range endpoints {
		texts = append(texts, e.String())
	}
	return texts
}

// The tracker receives the events of an informer, and the program applies what has
// changed. A failure loses nothing.
func Example() {
	tracker, err := changetracker.New(changetracker.Options{Node: changetracker.Node{Name: "node-1"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	tracker.Services.Update(nil, exampleService())
	tracker.Endpoints.EndpointSliceUpdate(exampleSlice("10.1.0.5"), false)

	program := func(result error) {
		err := tracker.Apply(v1.IPv4Protocol, func(d changetracker.Delta) ([]changetracker.ServicePortName, error) {
			for _, c := range d.Changes {
				fmt.Println(c.Name, c.After, "added", addresses(c.Added), "removed", addresses(c.Removed))
			}
			return nil, result
		})
		fmt.Println("result:", err)
	}
	program(errors.New("kernel is busy"))
	tracker.Endpoints.EndpointSliceUpdate(exampleSlice("10.1.0.5", "10.1.0.6"), false)
	program(nil)
	tracker.Endpoints.EndpointSliceUpdate(exampleSlice("10.1.0.6"), false)
	program(nil)
	// Output:
	// default/web:http 10.96.0.10:80/TCP added [10.1.0.5:8080] removed []
	// result: kernel is busy
	// default/web:http 10.96.0.10:80/TCP added [10.1.0.5:8080 10.1.0.6:8080] removed []
	// result: <nil>
	// default/web:http 10.96.0.10:80/TCP added [] removed [10.1.0.5:8080]
	// result: <nil>
}

// A program without an API server sets its own values.
func ExampleServiceChangeTracker_Set() {
	tracker, err := changetracker.New(changetracker.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	web := types.NamespacedName{Namespace: "lab", Name: "web"}
	name := changetracker.ServicePortName{NamespacedName: web, Port: "http", Protocol: v1.ProtocolTCP}
	_, err = tracker.Services.Set(web, changetracker.ServicePort{
		Name: name, ClusterIP: netip.MustParseAddr("192.0.2.10"), Port: 80,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = tracker.Endpoints.Set(name, changetracker.Endpoint{
		Addr: netip.MustParseAddrPort("198.51.100.7:8080"), Ready: true, Serving: true,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		s := delta.After
		for name, port := range s.All() {
			for _, e := range s.Endpoints(name) {
				fmt.Println(port, "->", &e)
			}
		}
		return nil, nil
	})
	fmt.Println(err)
	// Output:
	// 192.0.2.10:80/TCP -> 198.51.100.7:8080
	// <nil>
}

// Only the ready endpoint of the node's own zone gets traffic of policy Cluster.
func ExampleSelect() {
	port := &changetracker.ServicePort{ClusterIP: netip.MustParseAddr("192.0.2.10"), Port: 80}
	endpoints := []changetracker.Endpoint{
		{Addr: netip.MustParseAddrPort("198.51.100.7:8080"), Ready: true, ZoneHints: []string{"zone-a"}},
		{Addr: netip.MustParseAddrPort("198.51.100.8:8080"), Ready: true, ZoneHints: []string{"zone-b"}},
		{Addr: netip.MustParseAddrPort("198.51.100.9:8080"), Serving: true, Terminating: true},
	}
	s := changetracker.Select(port, endpoints, changetracker.Node{Zone: "zone-a"})
	for _, e := range s.Cluster {
		fmt.Println(e.Addr)
	}
	// Output: 198.51.100.7:8080
}

// One service port could not be programmed; only that one stays pending.
func ExampleTracker_Apply() {
	tracker, err := changetracker.New(changetracker.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	service := exampleService()
	service.Spec.Ports = append(service.Spec.Ports, v1.ServicePort{Name: "https", Protocol: v1.ProtocolTCP, Port: 443})
	tracker.Services.Update(nil, service)
	for range 2 {
		err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) (failed []changetracker.ServicePortName, err error) {
			for _, c := range delta.Changes {
				fmt.Println("programming", c.Name)
				if c.Name.Port == "https" { // there is no room in the map
					failed = append(failed, c.Name)
				}
			}
			return failed, nil
		})
		fmt.Println(err)
	}
	// Output:
	// programming default/web:http
	// programming default/web:https
	// <nil>
	// programming default/web:https
	// <nil>
}

// One State from the viewpoint of several nodes, in one process.
func ExampleState_For() {
	tracker, err := changetracker.New(changetracker.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	tracker.Services.Update(nil, exampleService())
	slice := exampleSlice("10.1.0.5", "10.2.0.5")
	slice.Endpoints[0].NodeName, slice.Endpoints[1].NodeName = new("node-1"), new("node-2")
	tracker.Endpoints.EndpointSliceUpdate(slice, false)
	err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		for _, c := range delta.Changes {
			for _, node := range []string{"node-1", "node-2", "node-3"} {
				s, _ := delta.After.For(changetracker.Node{Name: node}).Select(c.Name)
				fmt.Println(node, addresses(s.Local), "of", addresses(s.Cluster))
			}
		}
		return nil, nil
	})
	fmt.Println(err)
	// Output:
	// node-1 [10.1.0.5:8080] of [10.1.0.5:8080 10.2.0.5:8080]
	// node-2 [10.2.0.5:8080] of [10.1.0.5:8080 10.2.0.5:8080]
	// node-3 [] of [10.1.0.5:8080 10.2.0.5:8080]
	// <nil>
}

// Which service port has an address, and which Services have a pod as endpoint.
func ExampleState_ByAddr() {
	tracker, err := changetracker.New(changetracker.Options{ObjectOptions: changetracker.ObjectOptions{IndexEndpoints: true}})
	if err != nil {
		fmt.Println(err)
		return
	}
	tracker.Services.Update(nil, exampleService())
	tracker.Endpoints.EndpointSliceUpdate(exampleSlice("10.1.0.5", "10.1.0.6"), false)
	err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		for name := range delta.After.ByAddr(netip.MustParseAddrPort("10.96.0.10:80"), v1.ProtocolTCP) {
			fmt.Println("10.96.0.10:80/TCP is for", name)
		}
		for name := range delta.After.ByEndpoint(netip.MustParseAddr("10.1.0.6")) {
			fmt.Println("10.1.0.6 is an endpoint of", name)
		}
		return nil, nil
	})
	fmt.Println(err)
	// Output:
	// 10.96.0.10:80/TCP is for default/web:http
	// 10.1.0.6 is an endpoint of default/web:http
	// <nil>
}

// A health checker of the program ejects an endpoint that is ready in Kubernetes.
func ExampleTracker_Override() {
	tracker, err := changetracker.New(changetracker.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	tracker.Services.Update(nil, exampleService())
	tracker.Endpoints.EndpointSliceUpdate(exampleSlice("10.1.0.5", "10.1.0.6"), false)
	web := changetracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "default", Name: "web"}, Port: "http", Protocol: v1.ProtocolTCP,
	}
	show := func() {
		err := tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
			port, _ := delta.After.Service(web)
			selection := changetracker.Select(port, delta.After.Endpoints(web), delta.After.Node())
			fmt.Println(addresses(selection.Cluster))
			return nil, nil
		})
		if err != nil {
			fmt.Println(err)
		}
	}
	sick := netip.MustParseAddrPort("10.1.0.5:8080")
	tracker.Override(web, sick, changetracker.Override{Eject: true})
	show()
	tracker.Override(web, netip.MustParseAddrPort("10.1.0.6:8080"), changetracker.Override{Eject: true})
	show() // if no endpoint is left, none is ejected
	tracker.Override(web, sick, changetracker.Override{})
	show()
	// Output:
	// [10.1.0.6:8080]
	// [10.1.0.5:8080 10.1.0.6:8080]
	// [10.1.0.5:8080]
}

// A registry that is not Kubernetes reports all of its content periodically. The objects of
// the API server are tracked beside it.
func ExampleSource_Replace() {
	tracker, err := changetracker.New(changetracker.Options{ObjectOptions: changetracker.ObjectOptions{AwaitSources: []string{"registry"}}})
	if err != nil {
		fmt.Println(err)
		return
	}
	db := changetracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "lab", Name: "db"}, Protocol: v1.ProtocolTCP}
	port := changetracker.ServicePort{Name: db, ExternalIPs: []netip.Addr{netip.MustParseAddr("192.0.2.10")}, Port: 5432}
	for _, addr := range []string{"198.51.100.7:5432", "127.0.0.1:5432"} { // the second one is a mistake
		_, err := tracker.Source("registry").Replace(
			[]changetracker.ServicePort{port},
			map[changetracker.ServicePortName][]changetracker.Endpoint{
				db: {{Addr: netip.MustParseAddrPort(addr), Ready: true, Node: "db-1"}},
			},
		)
		fmt.Println(err != nil, tracker.Waiting())
	}
	err = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		for _, e := range delta.After.Endpoints(db) {
			fmt.Println(&port, "->", &e, "on", e.Node)
		}
		return nil, nil
	})
	fmt.Println(err)
	// Output:
	// false [EndpointSlices Services]
	// true [EndpointSlices Services]
	// 192.0.2.10:5432/TCP -> 198.51.100.7:5432 on registry/db-1
	// <nil>
}
