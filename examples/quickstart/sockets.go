package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
)

// socketShow is the demonstration of the userspace engine. It needs no privilege, and only
// the loopback network: the proxy listens there, and the Dial hook simulates the pods.
type socketShow struct {
	all     objects
	proxy   *proxier.Proxier
	engines []*userspace.Engine

	mu   sync.Mutex
	pods map[netip.Addr]string // names, guarded by mu
}

// showSockets proxies the Services in user space and prints the results of connections. A
// Service without endpoints gets one at the first connection.
func showSockets(ctx context.Context, out io.Writer, all objects) error {
	s := &socketShow{all: all, pods: map[netip.Addr]string{}}
	for _, slice := range all.Slices {
		for i := range slice.Endpoints {
			p := podOf(slice, i)
			s.pods[p.addr] = p.name
		}
	}
	config := userspace.Config{Config: all.config(), Hooks: userspace.Hooks{Dial: s.dial, Activate: s.activate}}
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range families() {
		engine, err := userspace.NewEngine(config, family, proxier.Deps{})
		if err != nil {
			return err
		}
		engines[family] = engine
		s.engines = append(s.engines, engine)
	}
	var err error
	if s.proxy, err = proxier.New(config.Config, proxier.Deps{}, engines); err != nil {
		return err
	}
	all.feed(s.proxy)
	return running(ctx, s.proxy, func(ctx context.Context) error { return s.play(ctx, out) })
}

func (s *socketShow) play(ctx context.Context, out io.Writer) error {
	if err := s.proxy.Sync(ctx); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	if _, err := fmt.Fprintf(out, "%d Services in user space, without privilege; each line is %d connections\n\n", len(s.all.Services), connections); err != nil {
		return err
	}
	var rows []row
	for _, engine := range s.engines {
		for _, site := range engine.Sockets() {
			rows = append(rows, row{
				service: site.Name.NamespacedName.String(), vip: site.Addr.String() + "/" + string(site.Name.Protocol),
				kind: site.Role.String(), from: "this process", outcome: whoAnswers(ctx, site),
			})
		}
	}
	if ctx.Err() == nil { // not interrupted by the user
		return write(out, rows)
	}
	return nil
}

// whoAnswers returns which pods answer at a socket, and how often.
func whoAnswers(ctx context.Context, site userspace.Site) string {
	counts := map[string]int{}
	for range connections {
		counts[askOnce(ctx, site)]++
	}
	return countsText(counts)
}

// answerTimeout covers the start of a pod and its response.
const answerTimeout = 5 * time.Second

func askOnce(ctx context.Context, site userspace.Site) string {
	d := net.Dialer{Timeout: answerTimeout}
	conn, err := d.DialContext(ctx, strings.TrimRight(site.Network, "46"), site.Addr.String())
	if err != nil {
		return "nobody: reset" // without a timeout
	}
	defer func() { _ = conn.Close() }() // the response has arrived
	_ = conn.SetDeadline(time.Now().Add(answerTimeout))
	_, _ = io.WriteString(conn, "who are you?") // Read returns the error
	name := make([]byte, 256)
	n, err := conn.Read(name)
	if err != nil {
		return "nobody: reset"
	}
	return string(name[:n])
}

// dial simulates the pod of an endpoint, which responds with its name.
func (s *socketShow) dial(_ context.Context, _ userspace.Connection, endpoint netip.AddrPort) (net.Conn, error) {
	s.mu.Lock()
	name := s.pods[endpoint.Addr()]
	s.mu.Unlock()
	client, server := net.Pipe()
	go func() { // ends with the connection
		defer func() { _ = server.Close() }()
		question := make([]byte, 256)
		if _, err := server.Read(question); err == nil {
			_, _ = io.WriteString(server, name)
		}
	}()
	return client, nil
}

// activate starts a pod for a Service without endpoints, like a cluster that scales from
// zero.
func (s *socketShow) activate(_ context.Context, name changetracker.ServicePortName) {
	for _, service := range s.all.Services {
		if service.Namespace != name.Namespace || service.Name != name.Name {
			continue
		}
		s.proxy.OnEndpointSliceAdd(s.start(service, discovery.AddressTypeIPv4, "10.244.9.9"))
		s.proxy.OnEndpointSliceAdd(s.start(service, discovery.AddressTypeIPv6, "fd00:10:244:9::9"))
	}
}

// start adds a simulated pod, and returns its EndpointSlice.
func (s *socketShow) start(service *v1.Service, family discovery.AddressType, addr string) *discovery.EndpointSlice {
	s.mu.Lock()
	s.pods[netip.MustParseAddr(addr)] = service.Name + ", started on demand"
	s.mu.Unlock()
	slice := &discovery.EndpointSlice{AddressType: family, Endpoints: []discovery.Endpoint{{Addresses: []string{addr}}}}
	slice.Namespace, slice.Name = service.Namespace, service.Name+"-"+strings.ToLower(string(family))
	slice.Labels = map[string]string{discovery.LabelServiceName: service.Name}
	for _, port := range service.Spec.Ports {
		slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: new(port.Name), Protocol: new(port.Protocol), Port: new(int32(8080))})
	}
	return slice
}
