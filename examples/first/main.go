// First is the smallest program: it proxies one Service until it is interrupted.
package main

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

func main() {
	p, err := nftables.New(nftables.Config{}, proxier.Deps{Logger: zap.NewExample()})
	if err != nil {
		log.Panic(err)
	}
	web := metav1.ObjectMeta{Namespace: "default", Name: "web", Labels: map[string]string{discovery.LabelServiceName: "web"}}
	p.OnServiceAdd(&v1.Service{ObjectMeta: web, Spec: v1.ServiceSpec{ClusterIP: "10.96.0.10", Ports: []v1.ServicePort{{Port: 80}}}})
	p.OnEndpointSliceAdd(&discovery.EndpointSlice{
		ObjectMeta: web, AddressType: discovery.AddressTypeIPv4,
		Endpoints: []discovery.Endpoint{{Addresses: []string{"10.244.0.7"}}},
		Ports:     []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
	})
	p.OnServiceSynced()
	p.OnEndpointSlicesSynced()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := errors.Join(p.Run(ctx), p.Cleanup(context.Background())); err != nil {
		log.Panic(err)
	}
}
