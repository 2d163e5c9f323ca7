// Package netns builds small networks out of anonymous Linux network namespaces:
// hosts, routers and pods with real sockets in them, for tests that judge a data
// plane by what packets do, and for programs that show one at work.
//
//	node, err := netns.New()            // a host: loopback up, nothing else
//	pod, err := netns.New()
//	err = netns.Connect(                // a cable, both ends up and usable
//	        netns.Plug{NS: node, Link: "pod0", Addrs: gateway},
//	        netns.Plug{NS: pod, Link: "eth0", Addrs: addresses})
//	server, err := netns.Serve(pod, "pod-0", 8080)
//	answer, err := netns.Ask(ctx, node, "tcp", target, netns.AskOptions{})
//
// A namespace has no name anywhere: it lives as long as its NS is open or a
// socket is in it, and dies with the process at the latest.
//
// Everything but this text needs Linux and CAP_SYS_ADMIN with CAP_NET_ADMIN.
package netns
