package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// cluster is a network of namespaces: the node with its pods, a router with the pods of all
// other nodes, and external clients. All default routes point to the node, and the node's to
// the router.
type cluster struct {
	node, router *host
	pods         map[string]*runningPod // by pod.key
	clients      map[string]client
	links        int
	hosts        []*host
}

// runningPod is a pod on a link to the node or to the router.
type runningPod struct {
	link    link
	addrs   []netip.Addr
	servers map[netip.AddrPort]*server
}

// link is the n-th link between a pod and its hub, the node or the router.
type link struct {
	hub, pod *host
	n        int
}

// client is a client with an address of each IP family.
type client struct {
	host   *host
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
	asking, err := c.addLink(c.node)
	if err != nil {
		return err
	}
	who := client{asking.pod, netip.MustParseAddr(askingPod4), netip.MustParseAddr(askingPod6)}
	if err := errors.Join(asking.addAddr(who.v4), asking.addAddr(who.v6)); err != nil {
		return err
	}
	c.clients["pod"] = who
	for _, slice := range all.Slices {
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
	c.pods, c.clients = map[string]*runningPod{}, map[string]client{}
	var outside *host
	for _, h := range []**host{&c.node, &c.router, &outside} {
		var err error
		if *h, err = c.addHost(); err != nil {
			return err
		}
	}
	c.clients["client"] = client{outside, netip.MustParseAddr(clientAddr4), netip.MustParseAddr(clientAddr6)}
	c.clients["stranger"] = client{outside, netip.MustParseAddr(strangerAddr4), netip.MustParseAddr(strangerAddr6)}
	return errors.Join(
		c.node.forward(), c.router.forward(),
		connect(plug{c.node, "outside", networks(gatewayAddr4, gatewayAddr6)},
			plug{outside, "eth0", networks(clientAddr4, clientAddr6, strangerAddr4, strangerAddr6)}),
		connect(plug{c.node, "uplink", networks(nodeAddr4, nodeAddr6)},
			plug{c.router, "uplink", networks(routerAddr4, routerAddr6)}),
		defaultRoute(outside, gatewayAddr4, gatewayAddr6),
		defaultRoute(c.router, nodeAddr4, nodeAddr6),
		defaultRoute(c.node, routerAddr4, routerAddr6),
	)
}

// addPod starts a pod, or adds an address or ports to a running one.
func (c *cluster) addPod(ctx context.Context, p pod, ports []uint16) error {
	running := c.pods[p.key()]
	if running == nil {
		hub := c.router
		if p.local {
			hub = c.node
		}
		cable, err := c.addLink(hub)
		if err != nil {
			return err
		}
		running = &runningPod{link: cable, servers: map[netip.AddrPort]*server{}}
		c.pods[p.key()] = running
	}
	if !slices.Contains(running.addrs, p.addr) {
		if err := running.link.addAddr(p.addr); err != nil {
			return err
		}
		running.addrs = append(running.addrs, p.addr)
	}
	for _, port := range ports {
		at := netip.AddrPortFrom(p.addr, port)
		if running.servers[at] != nil {
			continue
		}
		s, err := running.link.pod.serve(ctx, p.name, at)
		if err != nil {
			return err
		}
		running.servers[at] = s
	}
	return nil
}

// addLink connects a new pod to the node or the router, with addresses for the link.
func (c *cluster) addLink(hub *host) (link, error) {
	h, err := c.addHost()
	if err != nil {
		return link{}, err
	}
	c.links++
	cable := link{hub: hub, pod: h, n: c.links}
	return cable, errors.Join(
		connect(plug{hub, fmt.Sprintf("pod%d", cable.n), networks(cable.end4(1), cable.end6(1))},
			plug{h, "eth0", networks(cable.end4(2), cable.end6(2))}),
		defaultRoute(h, cable.end4(1), cable.end6(1)))
}

// addAddr adds an address to the pod, and a route for it to the hub.
func (l link) addAddr(addr netip.Addr) error {
	via := l.end4(2)
	if addr.Is6() {
		via = l.end6(2)
	}
	only := netip.PrefixFrom(addr, addr.BitLen())
	return errors.Join(l.pod.addAddr("lo", only), l.hub.addRoute(only, via))
}

// end4 and end6 return the addresses of the link: 1 is the hub's, 2 the pod's.
func (l link) end4(end int) string { return fmt.Sprintf("172.%d.%d.%d", 16+l.n>>8, l.n&0xff, end) }

func (l link) end6(end int) string { return fmt.Sprintf("fd00:172:%x::%d", l.n, end) }

// kill stops the servers of a pod.
func (c *cluster) kill(p pod) error {
	running := c.pods[p.key()]
	if running == nil {
		return nil // it was stopped with its address of the other IP family
	}
	delete(c.pods, p.key())
	return running.close()
}

func (p *runningPod) close() error {
	var errs []error
	for _, s := range p.servers {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}

// close deletes everything, also after build has failed.
func (c *cluster) close() error {
	var errs []error
	for _, p := range c.pods {
		errs = append(errs, p.close())
	}
	for _, h := range c.hosts {
		errs = append(errs, h.close())
	}
	return errors.Join(errs...)
}

func (c *cluster) addHost() (*host, error) {
	h, err := newHost()
	if err == nil {
		c.hosts = append(c.hosts, h)
	}
	return h, err
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

func defaultRoute(h *host, via4, via6 string) error {
	return errors.Join(h.addRoute(netip.MustParsePrefix("0.0.0.0/0"), via4), h.addRoute(netip.MustParsePrefix("::/0"), via6))
}
