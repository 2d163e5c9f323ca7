package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
)

const (
	// timeout bounds a connection. It covers a second SYN, which Linux needs to receive a
	// rejection over IPv6.
	timeout = 1500 * time.Millisecond
)

// question is a line of the table before its connections: a client and a frontend.
type question struct {
	row     row
	client  client
	network string
	to      netip.AddrPort
}

// probe connects to all frontends of the Services concurrently, and returns the lines in
// the order of the Services.
func (c *cluster) probe(ctx context.Context, all objects) []row {
	var questions []question
	for _, service := range all.Services {
		questions = append(questions, c.questions(service)...)
	}
	rows := make([]row, len(questions))
	var asking sync.WaitGroup
	for i, q := range questions {
		asking.Go(func() { rows[i] = ask(ctx, q) })
	}
	asking.Wait()
	return rows
}

// questions returns all combinations of frontends and clients of a Service.
func (c *cluster) questions(service *v1.Service) []question {
	var questions []question
	for _, port := range service.Spec.Ports {
		base := row{service: service.Namespace + "/" + service.Name}
		if service.Spec.ClusterIP == v1.ClusterIPNone || service.Spec.ClusterIP == "" {
			base.vip, base.outcome = "none", "nothing is programmed"
			return append(questions, question{row: base})
		}
		for _, f := range frontends(service, port) {
			r := base
			r.kind, r.policy = f.kind, f.policy
			r.vip = fmt.Sprintf("%s/%s", f.addr, port.Protocol)
			for _, from := range f.from {
				r.from = from
				questions = append(questions, question{
					row: r, client: c.clients[from], to: f.addr, network: strings.ToLower(string(port.Protocol)),
				})
			}
		}
	}
	return questions
}

// frontend is a frontend of a Service, and the clients that connect to it.
type frontend struct {
	kind, policy string
	addr         netip.AddrPort
	from         []string
}

func frontends(service *v1.Service, port v1.ServicePort) []frontend {
	number := uint16(port.Port)
	internal, external := "Cluster", cmp.Or(string(service.Spec.ExternalTrafficPolicy), "Cluster")
	if service.Spec.InternalTrafficPolicy != nil {
		internal = string(*service.Spec.InternalTrafficPolicy)
	}
	balancer := external
	outside := []string{"client"}
	if len(service.Spec.LoadBalancerSourceRanges) > 0 {
		balancer += ", ranges"
		outside = append(outside, "stranger")
	}
	if service.Spec.SessionAffinity == v1.ServiceAffinityClientIP {
		internal, external, balancer = internal+", sticky", external+", sticky", balancer+", sticky"
	}
	var all []frontend
	add := func(kind, policy, addr string, port uint16, from ...string) {
		if parsed, err := netip.ParseAddr(addr); err == nil {
			all = append(all, frontend{kind, policy, netip.AddrPortFrom(parsed, port), from})
		}
	}
	for _, ip := range service.Spec.ClusterIPs {
		add("ClusterIP", internal, ip, number, "pod", "client")
	}
	if port.NodePort != 0 {
		add("NodePort", external, nodeAddr4, uint16(port.NodePort), "client")
	}
	for _, ip := range service.Spec.ExternalIPs {
		add("ExternalIP", external, ip, number, "client")
	}
	for _, ingress := range service.Status.LoadBalancer.Ingress {
		add("LoadBalancer", balancer, ingress.IP, number, outside...)
	}
	return all
}

// ask opens the connections of one line.
func ask(ctx context.Context, q question) row {
	if q.client.host == nil {
		return q.row
	}
	from := q.client.addr(q.to.Addr())
	servers := map[string]int{}
	var sources []string
	for range connections {
		server, source, err := q.client.host.ask(ctx, q.network, from, q.to)
		if err != nil {
			servers[failure(err)]++
			if !errors.Is(err, unix.ECONNREFUSED) { // one timeout is enough
				break
			}
			continue
		}
		servers[server]++
		if seen := describe(source.Addr(), from); !slices.Contains(sources, seen) {
			sources = append(sources, seen)
		}
	}
	q.row.outcome, q.row.source = countsText(servers), strings.Join(sources, ", ")
	if len(sources) == 0 {
		for outcome := range servers {
			q.row.outcome = outcome
		}
	}
	return q.row
}

// describe returns whose address a server saw.
func describe(seen, client netip.Addr) string {
	if seen == client {
		return "client's own"
	}
	return "node"
}

func failure(err error) string {
	late, ok := errors.AsType[net.Error](err)
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return "nobody: rejected"
	case ok && late.Timeout(), errors.Is(err, unix.EPERM): // EPERM: the client's own host dropped the packet
		return "nobody: dropped"
	default:
		return err.Error()
	}
}
