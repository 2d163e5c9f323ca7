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

// socketShow is the show of the userspace engine. It needs no privilege, and no
// network but loopback: the proxy listens there, and the pods are made up by the hook
// that dials them.
type socketShow struct {
	all     objects
	proxy   *proxier.Proxier
	engines []*userspace.Engine

	mu   sync.Mutex
	pods map[netip.Addr]string // names, guarded by mu
}

// showSockets proxies the Services in user space and tells what clients experience.
// A Service without endpoints gets one as soon as somebody asks for it.
func showSockets(ctx context.Context, out io.Writer, all objects) error {
	s := &socketShow{all: all, pods: map[netip.Addr]string{}}
	for _, slice := range all.slices {
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
	if _, err := fmt.Fprintf(out, "%d Services in user space, without privilege; each line is %d connections\n\n", len(s.all.services), connections); err != nil {
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
	if ctx.Err() == nil { // an interrupted show has ended as it was asked to
		return write(out, rows)
	}
	return nil
}

// whoAnswers tells who answers at a socket.
func whoAnswers(ctx context.Context, site userspace.Site) string {
	counts := map[string]int{}
	for range connections {
		counts[askOnce(ctx, site)]++
	}
	return tally(counts)
}

// longestAnswer is how long an answer may take, a pod's beginning included.
const longestAnswer = 5 * time.Second

func askOnce(ctx context.Context, site userspace.Site) string {
	d := net.Dialer{Timeout: longestAnswer}
	conn, err := d.DialContext(ctx, strings.TrimRight(site.Network, "46"), site.Addr.String())
	if err != nil {
		return "nobody: reset" // at once
	}
	defer func() { _ = conn.Close() }() // everything is said
	_ = conn.SetDeadline(time.Now().Add(longestAnswer))
	_, _ = io.WriteString(conn, "who are you?") // that it fails, reading tells
	name := make([]byte, 256)
	n, err := conn.Read(name)
	if err != nil {
		return "nobody: reset"
	}
	return string(name[:n])
}

// dial plays the pod at an endpoint: it says its name.
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

// activate starts a pod for a Service that has none, as a cluster that scales from
// zero would.
func (s *socketShow) activate(_ context.Context, name changetracker.ServicePortName) {
	for _, service := range s.all.services {
		if service.Namespace != name.Namespace || service.Name != name.Name {
			continue
		}
		s.proxy.OnEndpointSliceAdd(s.start(service, discovery.AddressTypeIPv4, "10.244.9.9"))
		s.proxy.OnEndpointSliceAdd(s.start(service, discovery.AddressTypeIPv6, "fd00:10:244:9::9"))
	}
}

// start makes up a pod and its EndpointSlice.
func (s *socketShow) start(service *v1.Service, family discovery.AddressType, addr string) *discovery.EndpointSlice {
	s.mu.Lock()
	s.pods[netip.MustParseAddr(addr)] = service.Name + ", started when it was asked for"
	s.mu.Unlock()
	slice := &discovery.EndpointSlice{AddressType: family, Endpoints: []discovery.Endpoint{{Addresses: []string{addr}}}}
	slice.Namespace, slice.Name = service.Namespace, service.Name+"-"+strings.ToLower(string(family))
	slice.Labels = map[string]string{discovery.LabelServiceName: service.Name}
	for _, port := range service.Spec.Ports {
		slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: new(port.Name), Protocol: new(port.Protocol), Port: new(int32(8080))})
	}
	return slice
}
