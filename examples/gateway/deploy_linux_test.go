package main

import (
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	"k8s.io/client-go/rest"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
)

// The program uses all rights of the manifest, and needs no others; its addresses can be read.
func TestTheManifest(t *testing.T) {
	manifest := apitest.ReadManifest(t, "deploy.yaml")
	deployment := apitest.The[*apps.Deployment](t, manifest)
	pods := deployment.Spec.Template.Spec
	addresses, ok := strings.CutPrefix(pods.Containers[0].Args[0], "-addresses=")
	if pool, err := parsePool(addresses); !ok || err != nil || len(pool) != 2 {
		t.Errorf("addresses %v, error %v", pool, err)
	}
	c := newCluster(t, nil)
	account := apitest.NewAccount(c.Server, deployment.Namespace, pods.ServiceAccountName, manifest...)
	s := startStage(t, c, &rest.Config{Host: account.Serve(t, nil), ContentConfig: rest.ContentConfig{ContentType: "application/json"}, QPS: -1})
	s.backend("apps", "one", s.world.LocalPods[0])
	s.apply(edge)
	s.apply(both("web", ref("one", 1)))
	s.awaitBoth(gw.RouteReasonResolvedRefs)
	s.awaitGateway(2)
	account.ExpectExact(t)
}
