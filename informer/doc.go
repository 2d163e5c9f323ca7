// Package informer feeds a Provider from a Kubernetes API server. It is the only
// package of serviceplane that needs client-go, and builds everywhere.
//
// A program with informers of its own binds them:
//
//	factory := informers.NewSharedInformerFactory(client, 0)
//	stop, err := informer.Bind(factory, provider, informer.Options{NodeName: node})
//	factory.Start(ctx.Done())
//
// A program without lets Run keep its own, which the API server filters:
//
//	err := informer.Run(ctx, client, provider, informer.Options{NodeName: node})
//
// client-go tells nobody that an API server refuses connections, and waits for ever
// for one that accepts and never answers. A Link says why there is no answer, and
// gives up on it:
//
//	link := informer.NewLink(informer.LinkOptions{Logger: log})
//	link.Attach(config) // a *rest.Config, before its clients are made
//
// A cluster of a cluster set has ServiceImports besides (KEP-1645):
//
//	imports, err := dynamic.NewForConfig(config)
//	err = informer.Run(ctx, client, provider, informer.Options{NodeName: node, ServiceImports: imports})
//
// Either way the Provider hears of Services, EndpointSlices, the ServiceCIDRs and
// the node's own Node object, and writes nothing before all of what exists has
// arrived. Handlers only record: they never hold up client-go.
package informer
