package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/gateway-api/conformance/echo-basic/tcpserver"
	"sigs.k8s.io/gateway-api/conformance/echo-basic/udpechoserver"
	"sigs.k8s.io/yaml"

	"github.com/serviceplane/serviceplane/internal/apitest"
)

// node does what kubelet, and the controllers of Deployments and EndpointSlices, do in a real
// cluster: a Deployment's pods are servers at addresses of lo, and a Service gets a slice.
type node struct {
	t        *testing.T
	lo       netlink.Link
	cluster  *cluster
	pods     []*v1.Pod
	services []*v1.Service
}

// conformanceResources are the kinds of a cluster that the Gateway API's tests create.
func conformanceResources() []apitest.Resource {
	core := func(kind, name string) apitest.Resource {
		return apitest.Resource{GroupVersionKind: v1.SchemeGroupVersion.WithKind(kind), Name: name}
	}
	return []apitest.Resource{
		core("Namespace", "namespaces"), core("Service", "services"), core("Pod", "pods"), core("Secret", "secrets"), core("ConfigMap", "configmaps"),
		{GroupVersionKind: apps.SchemeGroupVersion.WithKind("Deployment"), Name: "deployments"},
		{GroupVersionKind: extensions.SchemeGroupVersion.WithKind("CustomResourceDefinition"), Name: "customresourcedefinitions"},
	}
}

// newCluster starts an API server whose Deployments and Services the node sees.
func (n *node) newCluster() *cluster {
	n.t.Helper()
	n.cluster = newCluster(n.t, n.admit, conformanceResources()...)
	for _, r := range crds(n.t) {
		crd := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(r.text, &crd.Object); err != nil {
			n.t.Fatal(err)
		}
		n.cluster.Put(n.t, crd)
	}
	return n.cluster
}

// admit is called for every object that a client writes.
func (n *node) admit(before, after *unstructured.Unstructured) error {
	if before != nil {
		return nil
	}
	convert := runtime.DefaultUnstructuredConverter.FromUnstructured
	switch after.GetKind() {
	case "Deployment":
		d := &apps.Deployment{}
		if err := convert(after.Object, d); err != nil {
			return err
		}
		n.start(d)
	case "Service":
		s := &v1.Service{}
		if err := convert(after.Object, s); err != nil {
			return err
		}
		n.services = append(n.services, s)
	}
	for _, s := range n.services {
		n.slice(s)
	}
	return nil
}

func (n *node) addAddr(prefix string) {
	n.t.Helper()
	addr, err := netlink.ParseAddr(prefix)
	if err != nil {
		n.t.Fatal(err)
	}
	addr.Flags = 0x02 // IFA_F_NODAD
	if err := netlink.AddrAdd(n.lo, addr); err != nil {
		n.t.Errorf("add %s: %v", prefix, err)
	}
}

// start starts the pods of a Deployment.
func (n *node) start(d *apps.Deployment) {
	for i := range deref(d.Spec.Replicas, 1) {
		ips := []string{fmt.Sprintf("10.1.0.%d", len(n.pods)+1), fmt.Sprintf("fd01::%x", len(n.pods)+1)}
		pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: d.Namespace, Name: fmt.Sprintf("%s-abc-%d", d.Name, i), Labels: d.Spec.Template.Labels}, Spec: d.Spec.Template.Spec}
		pod.Kind, pod.APIVersion = "Pod", "v1"
		pod.Status = v1.PodStatus{Phase: v1.PodRunning, Conditions: []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}}
		n.addAddr(ips[0] + "/32")
		n.addAddr(ips[1] + "/128")
		for _, ip := range ips {
			pod.Status.PodIPs = append(pod.Status.PodIPs, v1.PodIP{IP: ip})
			n.serve(pod, ip)
		}
		n.pods = append(n.pods, pod)
		n.cluster.Put(n.t, pod)
	}
}

// serve does at one address of a pod what its image does.
func (n *node) serve(pod *v1.Pod, ip string) {
	container := pod.Spec.Containers[0]
	me := tcpserver.Context{Namespace: pod.Namespace, Pod: pod.Name}
	echo := map[string]bool{"coredns": strings.Contains(container.Image, "coredns")}
	for _, e := range container.Env {
		echo[e.Name] = true
		if e.Name == "SERVICE_NAME" {
			me.Service = e.Value
		}
	}
	ctx := context.WithoutCancel(n.t.Context())
	if echo["TCP_ECHO_SERVER"] {
		if l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(ip, "3000")); err != nil {
			n.t.Error(err)
		} else {
			go answerLines(l, me)
		}
	}
	if echo["UDP_ECHO_SERVER"] || echo["coredns"] {
		port := map[bool]string{true: "53", false: "8080"}[echo["coredns"]]
		if c, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", net.JoinHostPort(ip, port)); err != nil {
			n.t.Error(err)
		} else {
			go answerDatagrams(c, me, echo["coredns"])
		}
	}
}

// answerLines speaks the protocol of the image echo-basic.
func answerLines(l net.Listener, me tcpserver.Context) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			_, _ = fmt.Fprint(conn, tcpserver.WelcomeMessage)
			for lines := bufio.NewScanner(conn); lines.Scan(); {
				about, _ := json.Marshal(tcpserver.TCPAssertions{Context: me})
				answers := map[string]string{"PING": "PONG", "IS_TLS": "false", "TEST": string(about)}
				_, _ = fmt.Fprintln(conn, answers[lines.Text()])
			}
		}()
	}
}

// answerDatagrams speaks the protocol of the image echo-basic, or DNS.
func answerDatagrams(c net.PacketConn, me tcpserver.Context, isDNS bool) {
	buffer := make([]byte, 4096)
	for {
		n, from, err := c.ReadFrom(buffer)
		if err != nil {
			return
		}
		answer, _ := json.Marshal(udpechoserver.EchoResponse{Request: string(buffer[:n]), Context: udpechoserver.Context{Namespace: me.Namespace, Service: me.Service, Pod: me.Pod}})
		if question := new(dns.Msg); isDNS && question.Unpack(buffer[:n]) == nil {
			answer, _ = new(dns.Msg).SetReply(question).Pack()
		}
		_, _ = c.WriteTo(answer, from)
	}
}

// slice writes the EndpointSlices of a Service.
func (n *node) slice(s *v1.Service) {
	if len(s.Spec.Selector) == 0 {
		return
	}
	for family, kind := range []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6} {
		slice := &discovery.EndpointSlice{AddressType: kind}
		slice.Namespace, slice.Name, slice.Labels = s.Namespace, s.Name+"-"+strings.ToLower(string(kind)), map[string]string{discovery.LabelServiceName: s.Name}
		for _, p := range s.Spec.Ports {
			number := p.TargetPort.IntVal
			slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &number})
		}
		for _, pod := range n.pods {
			if pod.Namespace == s.Namespace && labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
				slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{pod.Status.PodIPs[family].IP}})
			}
		}
		n.cluster.Put(n.t, slice)
	}
}
