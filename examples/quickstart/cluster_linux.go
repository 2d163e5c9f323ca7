package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/serviceplane/serviceplane/internal/netns"
)

// cluster is a network of namespaces: the node with its pods, a router with the pods of all
// other nodes, and external clients. All default routes point to the node, and the node's to
// the router.
type cluster struct {
	node, router *netns.NS
	pods         map[string]*server // by pod.key
	clients      map[string]client
	links        int
	namespaces   []*netns.NS
}

// server is a pod with its servers, on a link to the node or to the router.
type server struct {
	link  link
	addrs []netip.Addr
	ports []uint16
	serve []*netns.Server
}

// link is the n-th link between a pod and its hub, the node or the router.
type link struct {
	hub, pod *netns.NS
	n        int
}

// client is a client with an address of each IP family.
type client struct {
	ns     *netns.NS
	v4, v6 netip.Addr
}

// addr returns the client's address in the IP family of to.
func (c client) addr(to netip.Addr) netip.Addr {
	if to.Is4() {
		return c.v4
	}
	return c.v6
}

const (
	nodeAddr4, nodeAddr6         = "192.0.2.10", "2001:db8:2::10"
	routerAddr4, routerAddr6     = "192.0.2.1", "2001:db8:2::1"
	gatewayAddr4, gatewayAddr6   = "198.51.100.1", "2001:db8:c::1"
	clientAddr4, clientAddr6     = "198.51.100.2", "2001:db8:c::2"
	strangerAddr4, strangerAddr6 = "198.51.100.99", "2001:db8:c::99"
)

func (c *cluster) build(ctx context.Context, all objects) error {
	if err := c.buildHosts(); err != nil {
		return err
	}
	asking, err := c.connect(c.node)
	if err != nil {
		return err
	}
	who := client{asking.pod, netip.MustParseAddr(askingPod4), netip.MustParseAddr(askingPod6)}
	if err := errors.Join(asking.addAddr(who.v4), asking.addAddr(who.v6)); err != nil {
		return err
	}
	c.clients["pod"] = who
	for _, slice := range all.slices {
		for i := range slice.Endpoints {
			if p := podOf(slice, i); p.addr.IsValid() {
				if err := c.addPod(ctx, p, podPorts(slice)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// buildHosts builds everything except the pods.
func (c *cluster) buildHosts() error {
	c.pods, c.clients = map[string]*server{}, map[string]client{}
	var outside *netns.NS
	for _, host := range []**netns.NS{&c.node, &c.router, &outside} {
		ns, err := c.namespace()
		if err != nil {
			return err
		}
		*host = ns
	}
	c.clients["client"] = client{outside, netip.MustParseAddr(clientAddr4), netip.MustParseAddr(clientAddr6)}
	c.clients["stranger"] = client{outside, netip.MustParseAddr(strangerAddr4), netip.MustParseAddr(strangerAddr6)}
	return errors.Join(
		c.node.Forward(), c.router.Forward(),
		netns.Connect(netns.Plug{NS: c.node, Link: "outside", Addrs: networks(gatewayAddr4, gatewayAddr6)},
			netns.Plug{NS: outside, Link: "eth0", Addrs: networks(clientAddr4, clientAddr6, strangerAddr4, strangerAddr6)}),
		netns.Connect(netns.Plug{NS: c.node, Link: "uplink", Addrs: networks(nodeAddr4, nodeAddr6)},
			netns.Plug{NS: c.router, Link: "uplink", Addrs: networks(routerAddr4, routerAddr6)}),
		defaultRoute(outside, gatewayAddr4, gatewayAddr6),
		defaultRoute(c.router, nodeAddr4, nodeAddr6),
		defaultRoute(c.node, routerAddr4, routerAddr6),
	)
}

// addPod starts a pod, or adds an address or ports to a running one.
func (c *cluster) addPod(ctx context.Context, p pod, ports []uint16) error {
	s := c.pods[p.key()]
	if s == nil {
		hub := c.router
		if p.local {
			hub = c.node
		}
		cable, err := c.connect(hub)
		if err != nil {
			return err
		}
		s = &server{link: cable}
		c.pods[p.key()] = s
	}
	if !slices.Contains(s.addrs, p.addr) {
		if err := s.link.addAddr(p.addr); err != nil {
			return err
		}
		s.addrs = append(s.addrs, p.addr)
	}
	for _, port := range ports {
		if slices.Contains(s.ports, port) {
			continue
		}
		serving, err := netns.Serve(ctx, s.link.pod, p.name, port)
		if err != nil {
			return err
		}
		s.ports, s.serve = append(s.ports, port), append(s.serve, serving)
	}
	return nil
}

// connect connects a new pod to the node or the router, with addresses for the link.
func (c *cluster) connect(hub *netns.NS) (link, error) {
	ns, err := c.namespace()
	if err != nil {
		return link{}, err
	}
	c.links++
	cable := link{hub: hub, pod: ns, n: c.links}
	return cable, errors.Join(
		netns.Connect(netns.Plug{NS: hub, Link: fmt.Sprintf("pod%d", cable.n), Addrs: networks(cable.end4(1), cable.end6(1))},
			netns.Plug{NS: ns, Link: "eth0", Addrs: networks(cable.end4(2), cable.end6(2))}),
		defaultRoute(ns, cable.end4(1), cable.end6(1)))
}

// addAddr adds an address to the pod, and a route for it to the hub.
func (l link) addAddr(addr netip.Addr) error {
	via := l.end4(2)
	if addr.Is6() {
		via = l.end6(2)
	}
	host := netip.PrefixFrom(addr, addr.BitLen())
	return errors.Join(l.pod.AddAddrs("lo", host), l.hub.AddRoute(host, netip.MustParseAddr(via)))
}

// end4 and end6 return the addresses of the link: 1 is the hub's, 2 the pod's.
func (l link) end4(end int) string { return fmt.Sprintf("172.%d.%d.%d", 16+l.n>>8, l.n&0xff, end) }

func (l link) end6(end int) string { return fmt.Sprintf("fd00:172:%x::%d", l.n, end) }

// kill stops the servers of a pod.
func (c *cluster) kill(p pod) error {
	s := c.pods[p.key()]
	if s == nil {
		return nil // it was stopped with its address of the other IP family
	}
	delete(c.pods, p.key())
	return s.close()
}

func (s *server) close() error {
	var errs []error
	for _, serving := range s.serve {
		errs = append(errs, serving.Close())
	}
	return errors.Join(errs...)
}

// close deletes everything, also after build has failed.
func (c *cluster) close() error {
	var errs []error
	for _, s := range c.pods {
		errs = append(errs, s.close())
	}
	for _, ns := range c.namespaces {
		errs = append(errs, ns.Close())
	}
	return errors.Join(errs...)
}

func (c *cluster) namespace() (*netns.NS, error) {
	ns, err := netns.New()
	if err == nil {
		c.namespaces = append(c.namespaces, ns)
	}
	return ns, err
}

// networks parses addresses of links, with a prefix length of 24 or 64.
func networks(addrs ...string) []netip.Prefix {
	all := make([]netip.Prefix, len(addrs))
	for i, text := range addrs {
		addr := netip.MustParseAddr(text)
		all[i] = netip.PrefixFrom(addr, 24)
		if addr.Is6() {
			all[i] = netip.PrefixFrom(addr, 64)
		}
	}
	return all
}

func defaultRoute(ns *netns.NS, via4, via6 string) error {
	return errors.Join(
		ns.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr(via4)),
		ns.AddRoute(netip.MustParsePrefix("::/0"), netip.MustParseAddr(via6)))
}
