package nodeproxy

import (
	"context"
	"slices"
	"strconv"
	"testing"

	coordination "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/node/programmed"
	"github.com/serviceplane/serviceplane/node/programmed/cluster"
)

// TestLeases: nodeproxy says through the API server what it has programmed, with the rights and the
// switch of the manifest, which all are needed.
func TestLeases(t *testing.T) {
	t.Parallel()
	// Users bind the roles of waiters to the accounts of their programs.
	subjects := []rbac.Subject{{Kind: rbac.ServiceAccountKind, Namespace: "shop", Name: "waiter"}}
	manifest := append(apitest.ReadManifest(t, "deploy/programmed-leases.yaml"),
		&rbac.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: cluster.LeaseNamespace}, Subjects: subjects, RoleRef: rbac.RoleRef{Kind: "Role", Name: "programmed-waiter"}},
		&rbac.ClusterRoleBinding{Subjects: subjects, RoleRef: rbac.RoleRef{Kind: "ClusterRole", Name: "programmed-waiter"}})
	c := newSmall(t)
	api := apitest.New(t, apitest.Options{Resources: []apitest.Resource{{GroupVersionKind: coordination.SchemeGroupVersion.WithKind("Lease"), Name: "leases"}}})
	if namespace := apitest.The[*v1.Namespace](t, manifest); namespace.Name != cluster.LeaseNamespace {
		t.Errorf("the namespace of the manifest is %s, want %s", namespace.Name, cluster.LeaseNamespace)
	}
	for _, o := range manifest { // nodeproxy may write Leases, so there must be nothing else
		if r, ok := o.(*rbac.Role); ok && r.Namespace != cluster.LeaseNamespace {
			t.Errorf("Role %s is for namespace %s, want %s", r.Name, r.Namespace, cluster.LeaseNamespace)
		}
	}
	api.Put(t, apitest.The[*coordination.Lease](t, manifest))
	for _, o := range objects(t, thisNode+"---\n"+webService+"---\n"+webSlices(1)) {
		api.Put(t, o.Value)
	}
	inNode, err := c.node.Listen(t.Context(), "tcp", "127.0.0.1:6443")
	netnstest.Check(t, err)
	account := readDeployment(t).account
	proxy := apitest.NewAccount(api, account.Namespace, account.Name, slices.Concat(manifest, apitest.ReadManifest(t, daemonSet))...)
	waiter := apitest.NewAccount(api, "shop", "waiter", manifest...)
	p := start(t, c.node, "--master="+proxy.Serve(t, inNode), "--programmed-lease-namespace="+cluster.LeaseNamespace, "--state-dir="+t.TempDir())
	p.waitHealthy()
	client, err := cluster.New(&rest.Config{Host: waiter.Serve(t, nil)})
	netnstest.Check(t, err)
	for _, o := range objects(t, webSlices(2)) {
		api.Put(t, o.Value)
	}
	ctx, end := context.WithCancel(t.Context())
	w, stop, err := client.Leased(ctx, cluster.LeaseOptions{})
	netnstest.Check(t, err)
	defer func() { end(); stop() }()
	version := strconv.FormatUint(api.Version(), 10)
	if err := programmed.Wait(ctx, w, programmed.ServiceChange{Service: types.NamespacedName{Namespace: "default", Name: "web"}, Versions: changetracker.Versions{EndpointSlices: version}}); err != nil {
		t.Error(err)
	}
	c.expectNow("pod-2")
	proxy.ExpectExact(t)
	waiter.ExpectExact(t)
}
