// Package netns builds small networks from anonymous Linux network namespaces: hosts,
// routers and pods with real sockets. Tests of a data plane use it to check what happens
// to packets.
//
//	node, err := netns.New()            // a host: loopback up, nothing else
//	pod, err := netns.New()
//	err = netns.Connect(                // a cable, both ends up and usable
//	        netns.Plug{NS: node, Link: "pod0", Addrs: gateway},
//	        netns.Plug{NS: pod, Link: "eth0", Addrs: addresses})
//	server, err := netns.Serve(pod, "pod-0", 8080)
//	answer, err := netns.Ask(ctx, node, "tcp", target, netns.AskOptions{})
//
// A namespace has no name: it exists as long as its NS is open or a socket is in it, and
// ends with the process at the latest.
//
// The package needs Linux, CAP_SYS_ADMIN and CAP_NET_ADMIN.
package netns
