package main

import (
	"testing"

	apps "k8s.io/api/apps/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
)

// The controller of the manifest uses all rights of the manifest, and needs no others.
func TestTheManifest(t *testing.T) {
	t.Parallel()
	manifest := apitest.ReadManifest(t, "deploy.yaml")
	deployment := apitest.The[*apps.Deployment](t, manifest)
	pods := deployment.Spec.Template.Spec
	c := newCluster(t, 1)
	account := apitest.NewAccount(c.Server, deployment.Namespace, pods.ServiceAccountName, manifest...)
	c.Config = account.Kubeconfig(t)
	c.Put(t, pod())
	_, stop := c.start(pods.Containers[0].Args...)
	c.opens("pod-1")
	c.official("web", true)
	c.waitOurs(0)
	stop()
	account.ExpectExact(t)
}
