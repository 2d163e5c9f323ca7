package informer_test

import (
	"context"
	"net/netip"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/informer"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// Trackers alone follow an API server, without a driver and without handlers of their own.
func TestTrackersAlone(t *testing.T) {
	t.Parallel()
	web := proxiertest.Service("shop", "web", proxiertest.ClusterIPs("10.96.0.1"), proxiertest.Port("http", v1.ProtocolTCP, 80))
	slice := func(addresses ...string) *discovery.EndpointSlice {
		options := []proxiertest.SliceOption{proxiertest.SliceName("web-1"), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080)}
		for _, a := range addresses {
			options = append(options, proxiertest.Endpoint(a))
		}
		return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4, options...)
	}
	api := apitest.New(t, apitest.Options{})
	api.Put(t, web, slice("10.244.0.1"), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "me", Labels: map[string]string{v1.LabelTopologyZone: "a"}}})
	tracker, err := changetracker.New(changetracker.Options{ObjectOptions: changetracker.ObjectOptions{AwaitNode: true}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		_ = informer.Run(ctx, &rest.Config{Host: api.URL()}, &changetracker.Events{Tracker: tracker, ServiceCIDRs: func([]netip.Prefix) {}}, informer.Options{NodeName: "me"})
	})
	defer running.Wait()
	defer stop()
	<-tracker.Ready()
	name := changetracker.ServicePortName{Port: "http", Protocol: v1.ProtocolTCP}
	name.Namespace, name.Name = "shop", "web"
	holds := func(servicePorts, endpoints int) {
		t.Helper()
		poll.Until(t, "the tracker follows", func() (ok bool) {
			err := tracker.Apply(v1.IPv4Protocol, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
				ok = delta.After.Len() == servicePorts && len(delta.After.Endpoints(name)) == endpoints && delta.After.Node().Zone == "a"
				return nil, nil
			})
			return err == nil && ok
		})
	}
	holds(1, 1)
	api.Put(t, slice("10.244.0.1", "10.244.0.2"))
	holds(1, 2)
	api.Delete(t, slice())
	holds(1, 0)
	api.Delete(t, web)
	holds(0, 0)
}
