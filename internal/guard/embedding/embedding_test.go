// Package embedding compiles the code that EMBEDDING.md shows.
package embedding

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/node/healthcheck"
	"github.com/serviceplane/serviceplane/node/metrics"
	"github.com/serviceplane/serviceplane/node/zaplog"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// flows stands for the data plane of a CNI.
type flows struct{ busy bool }

func (f *flows) remove(name changetracker.ServicePortName) error {
	fmt.Println("remove", name)
	return nil
}

func (f *flows) install(s *desired.Service, directReturn bool) error {
	if f.busy {
		return errors.New("the switch is busy")
	}
	for _, frontend := range s.Frontends {
		fmt.Println("install", s.Key(&frontend), frontend.Action, s.Endpoints(frontend.Scope), "direct return:", directReturn)
	}
	return nil
}

// A CNI with a data plane of its own takes the trackers and what Services mean.
func Example_trackers() {
	service := proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.10"), proxiertest.Port("http", v1.ProtocolTCP, 80))
	service.Annotations = map[string]string{"example.net/direct-return": "yes"}
	slice := proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.244.1.7"))
	dataplane := &flows{}

	node := changetracker.Node{Name: "node-1", Zone: "zone-a"}
	tracker, err := changetracker.New(changetracker.Options{Node: node, ObjectOptions: changetracker.ObjectOptions{
		// What you have in annotations is parsed once, when the Service comes.
		DecorateService: func(p *changetracker.ServicePort, s *v1.Service) {
			p.Ext = s.Annotations["example.net/direct-return"] == "yes"
		},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	// In your informers' handlers.
	tracker.Services.Update(nil, service)
	tracker.Endpoints.EndpointSliceUpdate(slice, false)
	// In your sync, for each IP family. What fails is in the next Update again.
	resolver, updater := desired.Resolver{Node: node}, desired.NewUpdater()
	sync := func() error {
		return tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) (_ []changetracker.ServicePortName, err error) {
			var failed []changetracker.ServicePortName
			update := updater.Next(delta, resolver, desired.Globals{}, false)
			for _, change := range update.Changes {
				if s := change.After; s != nil {
					directReturn, _ := changetracker.Ext[bool](s.Port.Ext)
					err = dataplane.install(s, directReturn)
				} else {
					err = dataplane.remove(change.Name)
				}
				if err != nil {
					fmt.Println(change.Name, err)
					failed = append(failed, change.Name)
				}
			}
			updater.Done(failed)
			updater.Retry(failed...)
			return nil, nil
		})
	}

	dataplane.busy = true
	fmt.Println(sync())
	dataplane.busy = false
	fmt.Println(sync())
	tracker.Services.Update(service, nil)
	fmt.Println(sync())
	// Output:
	// shop/web:http the switch is busy
	// <nil>
	// install 10.96.0.10:80/TCP forward [10.244.1.7:8080] direct return: true
	// <nil>
	// remove shop/web:http
	// <nil>
}

// controller has no Kubernetes objects, and hands over values of its own.
func controller(ctx context.Context, p *proxier.Proxier) error {
	web := types.NamespacedName{Namespace: "lab", Name: "web"}
	name := changetracker.ServicePortName{NamespacedName: web, Port: "http", Protocol: v1.ProtocolTCP}
	tracker := p.Tracker()
	_, errService := tracker.Services.Set(web, changetracker.ServicePort{
		Name: name, ClusterIP: netip.MustParseAddr("192.0.2.10"), Port: 80,
	})
	_, errEndpoints := tracker.Endpoints.Set(name, changetracker.Endpoint{
		Addr: netip.MustParseAddrPort("198.51.100.7:8080"), Ready: true, Serving: true,
	})
	if err := errors.Join(errService, errEndpoints); err != nil {
		return err // names the field that cannot be right
	}
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	return p.Sync(ctx) // it is programmed; for later changes, Trigger does not wait
}

// sources has a registry's snapshot and another cluster's endpoints in one tracker.
func sources(tracker *changetracker.Tracker, port changetracker.ServicePort, near changetracker.Endpoint, fromWest *discovery.EndpointSlice) (err error) {
	_, err = tracker.Source("registry").Replace(
		[]changetracker.ServicePort{port},
		map[changetracker.ServicePortName][]changetracker.Endpoint{port.Name: {near}},
	)
	if err != nil {
		return err // nothing has changed
	}
	tracker.Source("west").Endpoints.EndpointSliceUpdate(fromWest, false) // in the handlers of that cluster
	return nil
}

// Endpoints of a registry and of another cluster, as two nodes see them.
func Example_sources() {
	here := changetracker.Node{Name: "node-1"}
	tracker, err := changetracker.New(changetracker.Options{Node: here})
	if err != nil {
		fmt.Println(err)
		return
	}
	web := types.NamespacedName{Namespace: "shop", Name: "web"}
	port := changetracker.ServicePort{
		Name:      changetracker.ServicePortName{NamespacedName: web, Port: "http", Protocol: v1.ProtocolTCP},
		ClusterIP: netip.MustParseAddr("10.96.0.10"), Port: 80,
	}
	near := changetracker.Endpoint{Addr: netip.MustParseAddrPort("192.0.2.7:8080"), Ready: true, Serving: true, Node: "node-1"}
	fromWest := proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
		proxiertest.SlicePort("http", v1.ProtocolTCP, 8080), proxiertest.Endpoint("10.245.1.7", proxiertest.OnNode("node-1")))
	if err := sources(tracker, port, near, fromWest); err != nil {
		fmt.Println(err)
	}
	_ = tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
		for _, node := range []changetracker.Node{here, {Name: "west/node-1"}} {
			s, _ := delta.After.For(node).Select(port.Name)
			fmt.Println(node.Name, "uses", len(s.Cluster), "endpoints, and has", len(s.Local), "itself")
		}
		return nil, nil
	})
	// Output:
	// node-1 uses 2 endpoints, and has 0 itself
	// west/node-1 uses 2 endpoints, and has 1 itself
}

// program is what a distribution's node binary has anyway.
type program struct {
	config   *rest.Config
	registry prometheus.Registerer
	mux      *http.ServeMux
	log      *zap.Logger
}

// inProcess runs where a kube-proxy ran.
func inProcess(ctx context.Context, own program, config proxier.Config, node string) error {
	observer, err := metrics.New(own.registry, metrics.Options{Mode: "nftables"})
	if err != nil {
		return err
	}
	config.Node.Name = node
	config.Names = proxier.KubeProxyNames() // it takes over from the kube-proxy that was here
	config.Masquerade.NodePodCIDRs = true   // or PodCIDRs: without either, every client of a ClusterIP keeps its source
	p, err := nftables.New(nftables.Config{Config: config}, proxier.Deps{Logger: own.log, Observer: observer})
	if err != nil {
		return err // names every field that is wrong
	}
	observer.Watch(metrics.Sources{Status: p.Status})
	own.mux.Handle("/healthz", healthcheck.NewHandler(p.Status, healthcheck.HandlerOptions{Answered: observer.ObserveHealth}))
	own.mux.Handle("/debug/services/", http.StripPrefix("/debug/services", debughttp.Handler(p)))

	tasks, ctx := errgroup.WithContext(ctx)
	tasks.Go(func() error { return p.Run(ctx) })
	tasks.Go(func() error {
		return informer.Run(ctx, own.config, p, informer.Options{NodeName: node, Logger: own.log})
	})
	return tasks.Wait() // every goroutine has ended, the rules stay
}

// Programs that have another logger than zap's.
func Example_loggers() {
	own := funcr.New(func(_, line string) { fmt.Println(line) }, funcr.Options{})
	deps := proxier.Deps{Logger: zaplog.FromSlog(slog.Default())}
	deps.Logger = zaplog.FromLogr(own)
	deps.Logger.Info("hello", zap.Int("rules", 2))
	// Output: "level"=0 "msg"="hello" "rules"=2
}

// explain answers what an operator asks: why does this packet not arrive?
func explain(ctx context.Context, p *proxier.Proxier) (string, error) {
	e, err := p.Explain(ctx, desired.Packet{
		Protocol:    desired.TCP,
		Source:      netip.MustParseAddr("198.51.100.7"),
		Destination: netip.MustParseAddrPort("192.0.2.10:80"),
		Origin:      desired.FromPod,
	})
	if err != nil {
		return "", err
	}
	text := fmt.Sprintln(e.Verdict, e.Reasons)
	for _, endpoint := range e.Endpoints {
		text += fmt.Sprintln(endpoint.Addr, endpoint.Excluded) // why it gets nothing, if so
	}
	return text, nil
}
