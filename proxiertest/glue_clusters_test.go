package proxiertest_test

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// clusterSet merges the exported objects of several clusters into one proxy. Each cluster
// has a client of its own, as it has informers of its own in a real program.
type clusterSet struct{ proxy *proxier.Proxier }

// exported forwards an EndpointSlice of a cluster: that of a Service becomes one of the
// ServiceImport. The cluster's object is not changed.
func (c *clusterSet) exported(cluster string, s *discovery.EndpointSlice, gone bool) {
	s = s.DeepCopy()
	s.Labels = map[string]string{changetracker.LabelServiceImport: s.Labels[discovery.LabelServiceName]}
	if c.proxy.Tracker().Source(cluster).Endpoints.EndpointSliceUpdate(s, gone) {
		c.proxy.Trigger()
	}
}

// listed forwards that a cluster's first list is complete.
func (c *clusterSet) listed(cluster string) {
	c.proxy.Tracker().Source(cluster).Synced()
	c.proxy.Trigger()
}

// left deletes the objects of a cluster.
func (c *clusterSet) left(cluster string) {
	if _, err := c.proxy.Tracker().Source(cluster).Replace(nil, nil); err != nil {
		panic(err) // an empty snapshot is valid
	}
	c.proxy.Trigger()
}

// One clusterset IP leads to two clusters that have EndpointSlices and nodes of the same names.
func TestGlueOfTwoClusters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		engine := &proxiertest.RecordingEngine{}
		here := changetracker.Node{Name: "node-1"}
		p, err := proxier.New(proxier.Config{
			Families: []v1.IPFamily{v1.IPv4Protocol}, Node: here,
			Tracker: changetracker.ObjectOptions{Cluster: "home", AwaitSources: []string{"east", "west"}},
		}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		set := &clusterSet{proxy: p}
		web := types.NamespacedName{Namespace: "shop", Name: "web"}
		name := changetracker.ServicePortName{NamespacedName: changetracker.ImportedService(web), Port: "http", Protocol: v1.ProtocolTCP}
		slice := func(options ...proxiertest.SliceOption) *discovery.EndpointSlice {
			return proxiertest.Slice("shop", "web", discovery.AddressTypeIPv4,
				append(options, proxiertest.SliceName("web-x7k2p"), proxiertest.SlicePort("http", v1.ProtocolTCP, 8080))...)
		}
		at := func(addr string) proxiertest.SliceOption {
			return proxiertest.Endpoint(addr, proxiertest.OnNode("node-1"))
		}
		want := func(when, cluster, local string) {
			t.Helper()
			if err := proxiertest.Sync(ctx, p); err != nil {
				t.Fatal(err)
			}
			addrs := func(list []netip.AddrPort) (text string) {
				for _, a := range list {
					text += " " + a.Addr().String()
				}
				return text
			}
			s := engine.Services()[name]
			if s == nil {
				t.Fatalf("%s: the imported Service is not programmed", when)
			}
			if got := addrs(s.Cluster.Slice()); got != cluster {
				t.Errorf("%s: endpoints%s, want%s", when, got, cluster)
			}
			if got := addrs(s.Local.Slice()); got != local {
				t.Errorf("%s: endpoints of this node%s, want%s", when, got, local)
			}
			if !slices.Equal(s.OnNode, localAddrs(s.Local.Slice())) { // pods of another cluster are not masqueraded as local ones
				t.Errorf("%s: endpoints that may be on this node %v, want %v", when, s.OnNode, s.Local)
			}
		}
		p.OnServiceAdd(proxiertest.Service("shop", name.Name, proxiertest.ClusterIPs("172.30.0.1"), proxiertest.InternalPolicyLocal(),
			proxiertest.Port("http", v1.ProtocolTCP, 80), proxiertest.ExternalIPs("198.51.100.1")))
		own := slice(at("10.0.0.1"))
		own.Labels = map[string]string{changetracker.LabelServiceImport: "web", changetracker.LabelSourceCluster: "home"}
		p.OnEndpointSliceAdd(own)
		p.OnServiceSynced()
		p.OnEndpointSlicesSynced()
		set.exported("east", slice(at("10.1.0.1"), at("10.1.0.2")), false)
		set.listed("east")
		set.exported("west", slice(at("10.2.0.1")), false)
		if synctest.Wait(); len(engine.Updates()) != 0 {
			t.Errorf("%d updates before west is known, want none", len(engine.Updates()))
		}
		set.listed("west")
		want("all are known", " 10.0.0.1 10.1.0.1 10.1.0.2 10.2.0.1", " 10.0.0.1")
		set.exported("east", slice(at("10.1.0.2")), false)
		want("east has less", " 10.0.0.1 10.1.0.2 10.2.0.1", " 10.0.0.1")
		set.exported("west", slice(), true)
		want("west has none", " 10.0.0.1 10.1.0.2", " 10.0.0.1")
		set.exported("west", slice(at("10.2.0.3")), false)
		set.left("east")
		want("east is gone", " 10.0.0.1 10.2.0.3", " 10.0.0.1")
		p.OnEndpointSliceDelete(own)
		want("none here", " 10.2.0.3", "")
		if view := p.Programmed(v1.IPv4Protocol).For(changetracker.Node{Name: "west/node-1"}); view.LocalReady(name.NamespacedName) != 1 {
			t.Errorf("%d endpoints are local to west's node-1, want 1", view.LocalReady(name.NamespacedName))
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func localAddrs(list []netip.AddrPort) (addrs []netip.Addr) {
	for _, a := range list {
		addrs = append(addrs, a.Addr())
	}
	return addrs
}
