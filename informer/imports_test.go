package informer

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
)

func serviceImport(spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "multicluster.x-k8s.io/v1alpha1", "kind": "ServiceImport",
		"metadata": map[string]any{"namespace": "test", "name": "web", "uid": "u-web", "creationTimestamp": "2026-01-02T03:04:05Z"},
		"spec":     spec,
	}}
}

// webImport returns a ServiceImport of type ClusterSetIP, with a port web.
func webImport(ips ...any) *unstructured.Unstructured {
	return serviceImport(map[string]any{
		"type": "ClusterSetIP", "ips": ips, "ports": []any{map[string]any{"name": "web", "protocol": "TCP", "port": int64(80)}},
	})
}

func dynamicClient(objects ...runtime.Object) *dynamicfake.FakeDynamicClient {
	return dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{serviceImports: "ServiceImportList"}, objects...)
}

// The fields are those of KEP-1645.
func TestServiceOfAServiceImport(t *testing.T) {
	spec := map[string]any{
		"type": "ClusterSetIP", "ips": []any{"fd00:30::1", "172.30.0.1"}, "sessionAffinity": "ClientIP", "internalTrafficPolicy": "Local",
		"sessionAffinityConfig": map[string]any{"clientIP": map[string]any{"timeoutSeconds": int64(60)}},
		"ports":                 []any{map[string]any{"name": "dns", "protocol": "UDP", "port": int64(53), "appProtocol": "dns"}, map[string]any{"port": int64(80)}},
	}
	tracker, err := changetracker.New(changetracker.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ports := func(spec map[string]any) (texts []string, fault error) {
		object := serviceImport(spec)
		service, fault := serviceOf(object)
		tracker.Services.Update(nil, service)
		for _, family := range []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol} {
			_ = tracker.Apply(family, func(delta changetracker.Delta) ([]changetracker.ServicePortName, error) {
				for name, p := range delta.After.All() {
					if name.NamespacedName.String() != "test/web.clusterset" || p.UID != "u-web" || p.CreationTimestamp.Year() != 2026 || !p.InternalPolicyLocal {
						t.Errorf("service port %v: %+v, want the ServiceImport's name, UID, age and policy", name, p)
					}
					texts = append(texts, name.Port+" "+p.String()+" "+p.SessionAffinity.String())
				}
				return nil, nil
			})
		}
		slices.Sort(texts)
		return texts, fault
	}
	with := func(field string, value any) map[string]any {
		changed := runtime.DeepCopyJSON(spec)
		changed[field] = value
		return changed
	}
	all := []string{" 172.30.0.1:80/TCP 1m0s", " [fd00:30::1]:80/TCP 1m0s", "dns 172.30.0.1:53/UDP 1m0s", "dns [fd00:30::1]:53/UDP 1m0s"}
	for name, c := range map[string]struct {
		spec map[string]any
		want []string
	}{
		"all of it":        {spec, all},
		"no affinity":      {with("sessionAffinity", "None"), []string{" 172.30.0.1:80/TCP 0s", " [fd00:30::1]:80/TCP 0s", "dns 172.30.0.1:53/UDP 0s", "dns [fd00:30::1]:53/UDP 0s"}},
		"one family":       {with("ips", []any{"172.30.0.1"}), []string{all[0], all[2]}},
		"one IP is none":   {with("ips", []any{"fd00:30::1", "any"}), []string{all[1], all[3]}},
		"no IP yet":        {with("ips", []any{}), nil},
		"Headless":         {with("type", "Headless"), nil},
		"fields of future": {with("trafficDistribution", "PreferClose"), all},
	} {
		if got, err := ports(c.spec); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: service ports %q, %v, want %q", name, got, err, c.want)
		}
	}
	if got, err := ports(with("ports", "80")); err == nil || len(got) != 0 {
		t.Errorf("ports of a wrong type: service ports %q, %v, want none and an error", got, err)
	}
}

// An imported Service has the endpoints of all clusters. The cluster's own Service of the
// same name is independent of it.
func TestAnImportedServiceIsProxied(t *testing.T) {
	importedSlice := func(cluster, addr string) *discovery.EndpointSlice {
		s := slice("web-"+cluster, addr)
		s.Labels = map[string]string{changetracker.LabelServiceImport: "web", changetracker.LabelSourceCluster: cluster}
		return s
	}
	c := startCluster(t, apitest.Options{}, Options{ServiceImports: true}, webImport("172.30.0.1"),
		service("web", "10.96.0.1"), slice("web", "10.244.0.1"), importedSlice("east", "10.1.0.1"), importedSlice("west", "10.2.0.1"))
	c.mustHold(t, "10.96.0.1=10.244.0.1 172.30.0.1=10.1.0.1,10.2.0.1")
	if updates := c.engine.Updates(); len(slices.Collect(updates[0].Services())) != 2 {
		t.Errorf("the first update has %+v, want the imported Service in it", updates[0])
	}
	for _, change := range []struct {
		object *unstructured.Unstructured
		want   string
	}{
		{webImport("172.30.0.2"), "10.96.0.1=10.244.0.1 172.30.0.2=10.1.0.1,10.2.0.1"},
		{serviceImport(map[string]any{"type": "Headless"}), "10.96.0.1=10.244.0.1"},
		{webImport("172.30.0.3"), "10.96.0.1=10.244.0.1 172.30.0.3=10.1.0.1,10.2.0.1"},
		{serviceImport(map[string]any{"ips": "172.30.0.3"}), "10.96.0.1=10.244.0.1"},
		{webImport("172.30.0.4"), "10.96.0.1=10.244.0.1 172.30.0.4=10.1.0.1,10.2.0.1"},
	} {
		c.Put(t, change.object)
		c.mustHold(t, change.want)
	}
	if c.logs.FilterMessage("invalid ServiceImport is ignored").Len() == 0 {
		t.Errorf("log %v, want a line about what could not be read", c.logs.All())
	}
	c.Delete(t, webImport())
	c.mustHold(t, "10.96.0.1=10.244.0.1")
}

// A missing resource delays nothing, and may be installed later. A forbidden one delays
// the first sync by WaitTimeout at most.
func TestServiceImportsThatCannotBeWatched(t *testing.T) {
	resource := serviceImports.GroupResource()
	for name, c := range map[string]struct {
		err    error
		waited time.Duration
		lines  string
	}{
		"missing": {apierrors.NewNotFound(resource, ""), 0, "no ServiceImports"},
		"refused": {apierrors.NewForbidden(resource, "", nil), defaultWaitTimeout, "watch of the API server|first sync starts without"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				imports, installed := dynamicClient(webImport("172.30.0.1")), atomic.Bool{}
				imports.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return !installed.Load(), nil, c.err })
				core, logs := observer.New(zap.InfoLevel)
				r := &recorder{}
				factory := informers.NewSharedInformerFactory(fake.NewClientset(service("a", "10.96.0.1")), 0)
				o := Options{Logger: zap.New(core)}
				watched, err := NewServiceImports(imports, o)
				if err != nil {
					t.Fatal(err)
				}
				stop, err := Bind(Informers{
					Services: factory.Core().V1().Services().Informer(), EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(), ServiceImports: watched,
				}, r, o)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				factory.StartWithContext(ctx)
				go watched.RunWithContext(ctx)
				begun := time.Now()
				for !slices.Contains(r.all(), "slices synced") && time.Since(begun) < time.Hour {
					time.Sleep(100 * time.Millisecond)
				}
				if waited := time.Since(begun).Truncate(time.Second); waited != c.waited {
					t.Errorf("the first sync waited for %v, want %v", waited, c.waited)
				}
				time.Sleep(4 * time.Minute)
				var lines []string
				for _, l := range logs.All() {
					lines = append(lines, l.Message)
				}
				for line := range strings.SplitSeq(c.lines, "|") {
					if n := len(slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return !strings.Contains(l, line) })); n != 1 {
						t.Errorf("log %q has %d lines %q, want 1", lines, n, line)
					}
				}
				installed.Store(true)
				time.Sleep(time.Minute)
				synctest.Wait()
				if !slices.Contains(r.all(), "add web.clusterset") {
					t.Errorf("calls %v, want the ServiceImport once it can be watched", r.all())
				}
				stop()
				cancel()
				factory.Shutdown()
			})
		})
	}
}
