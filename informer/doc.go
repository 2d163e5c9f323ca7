// Package informer connects a Provider to a Kubernetes API server. Only this package,
// node/programmed/cluster and node/nodeproxy need client-go. Run is for programs without
// informers of their own, Bind for those that have them.
//
// A program that has informers binds them:
//
//	factory := informers.NewSharedInformerFactory(client, 0)
//	stop, err := informer.Bind(informer.Informers{
//		Services:       factory.Core().V1().Services().Informer(),
//		EndpointSlices: factory.Discovery().V1().EndpointSlices().Informer(),
//		ServiceCIDRs:   factory.Networking().V1().ServiceCIDRs().Informer(),
//		Nodes:          factory.Core().V1().Nodes().Informer(),
//	}, provider, informer.Options{NodeName: node})
//	factory.Start(ctx.Done())
//
// For other programs, Run watches the API server, with filters that the server applies. It
// stores no objects, so it needs far less memory than informers:
//
//	err := informer.Run(ctx, config, provider, informer.Options{NodeName: node})
//
// Run takes a *rest.Config. The package does without client-go's clientset and informer
// factories, which contain every API group: a program without them is 13 MB smaller.
//
// client-go does not report that an API server refuses connections, and waits forever
// for one that accepts a connection but does not answer. A Link logs why there is no
// answer, and ends the request:
//
//	link := informer.NewLink(informer.LinkOptions{Logger: log})
//	link.Attach(config) // before Run
//
// A cluster of a cluster set also has ServiceImports (KEP-1645): set Options.ServiceImports
// for Run, or bind an informer of NewServiceImports.
//
// The Provider receives the events of Services, EndpointSlices, ServiceCIDRs and its own
// Node. It programs nothing before it has all existing objects. The handlers only record
// events, so they never block client-go.
package informer
