// Package informer connects a Provider to a Kubernetes API server. It is the only
// package of serviceplane that needs client-go.
//
// A program that has informers binds them:
//
//	factory := informers.NewSharedInformerFactory(client, 0)
//	stop, err := informer.Bind(factory, provider, informer.Options{NodeName: node})
//	factory.Start(ctx.Done())
//
// For other programs, Run creates informers, with filters that the API server applies:
//
//	err := informer.Run(ctx, client, provider, informer.Options{NodeName: node})
//
// client-go does not report that an API server refuses connections, and waits forever
// for one that accepts a connection but does not answer. A Link logs why there is no
// answer, and ends the request:
//
//	link := informer.NewLink(informer.LinkOptions{Logger: log})
//	link.Attach(config) // a *rest.Config, before its clients are made
//
// A cluster of a cluster set also has ServiceImports (KEP-1645):
//
//	imports, err := dynamic.NewForConfig(config)
//	err = informer.Run(ctx, client, provider, informer.Options{NodeName: node, ServiceImports: imports})
//
// The Provider receives the events of Services, EndpointSlices, ServiceCIDRs and its own
// Node. It programs nothing before it has all existing objects. The handlers only record
// events, so they never block client-go.
package informer
