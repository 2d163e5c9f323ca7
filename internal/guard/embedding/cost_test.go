package embedding

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// slice is an EndpointSlice as Kubernetes writes it.
func slice(endpoints int) *discovery.EndpointSlice {
	yes, zone, tcp, port, http := true, "eu-west-1a", v1.ProtocolTCP, int32(8080), "http"
	s := &discovery.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Name: "checkout-frontend-x7k2p", Namespace: "production", UID: "7a6f3c1e-52d0-4a41-9a54-1d2f6a0c9b11", ResourceVersion: "1234567890", Generation: 42,
			Labels: map[string]string{discovery.LabelServiceName: "checkout-frontend", discovery.LabelManagedBy: "endpointslice-controller.k8s.io"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Service", Name: "checkout-frontend", UID: "3f0d6d52-8f0b-4a39-8b38-6a1de2a1c0aa", Controller: &yes, BlockOwnerDeletion: &yes,
			}},
			ManagedFields: []metav1.ManagedFieldsEntry{{
				Manager: "kube-controller-manager", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "discovery.k8s.io/v1", FieldsType: "FieldsV1",
				FieldsV1: metav1.NewFieldsV1(`{"f:addressType":{},"f:endpoints":{},"f:metadata":{"f:annotations":{".":{},"f:endpoints.kubernetes.io/last-change-trigger-time":{}},` +
					`"f:generateName":{},"f:labels":{".":{},"f:endpointslice.kubernetes.io/managed-by":{},"f:kubernetes.io/service-name":{}},` +
					`"f:ownerReferences":{".":{},"k:{\"uid\":\"3f0d6d52-8f0b-4a39-8b38-6a1de2a1c0aa\"}":{}}},"f:ports":{}}`),
			}},
		},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &http, Protocol: &tcp, Port: &port}},
	}
	for i := range endpoints {
		node := fmt.Sprintf("ip-10-12-%d-%d.eu-west-1.compute.internal", i/250, i%250)
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{fmt.Sprintf("10.244.%d.%d", i/250, i%250)}, NodeName: &node, Zone: &zone,
			Conditions: discovery.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: new(bool)},
			TargetRef: &v1.ObjectReference{
				Kind: "Pod", Namespace: "production", Name: fmt.Sprintf("checkout-frontend-6d5f7c9b8d-%05d", i), UID: types.UID(fmt.Sprintf("9c0e4f3a-1b7d-4d0e-8e55-%012d", i)),
			},
		})
	}
	return s
}

// bytesText is a size with two digits.
func bytesText(n float64) string {
	units := []string{"B", "kB", "MB", "GB"}
	for n >= 1000 && len(units) > 1 {
		n, units = n/1000, units[1:]
	}
	rounded, _ := strconv.ParseFloat(fmt.Sprintf("%.1e", n), 64)
	if rounded < 10 {
		return fmt.Sprintf("%.1f %s", rounded, units[0])
	}
	return fmt.Sprintf("%.0f %s", rounded, units[0])
}

// TestTheCostOfACluster does the arithmetic of COST.md.
func TestTheCostOfACluster(t *testing.T) {
	t.Parallel()
	read, err := os.ReadFile("../../../docs/COST.md")
	if err != nil {
		t.Fatal(err)
	}
	expect := func(lines ...string) {
		t.Helper()
		if text := strings.Join(lines, "\n"); !strings.Contains(string(read), text) {
			t.Errorf("COST.md lacks\n%s", text)
		}
	}
	binary := map[int]float64{}
	sizes := []string{"| endpoints of a slice | protobuf | JSON | what has changed |", "|--:|--:|--:|--:|"}
	var delta float64
	for _, endpoints := range []int{10, 100} {
		s := slice(endpoints)
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		binary[endpoints] = float64(s.Size())
		changed := *s
		changed.Endpoints, changed.ObjectMeta, changed.Ports = s.Endpoints[:1], metav1.ObjectMeta{Name: s.Name, Namespace: s.Namespace, ResourceVersion: s.ResourceVersion}, nil
		changed.Endpoints[0].TargetRef = nil
		delta = float64(changed.Size())
		sizes = append(sizes, fmt.Sprintf("| %d | %s | %s | %s |", endpoints, bytesText(binary[endpoints]), bytesText(float64(len(text))), bytesText(delta)))
	}
	expect(append(sizes, "")...)

	flips := []string{"| nodes | slice of 10 | slice of 100 | only what has changed | to one node in 100, slice of 100 |", "|--:|--:|--:|--:|--:|"}
	days := []string{"| nodes | pods | changes a second | API servers send, slices of 10 | a node receives | a node's first list |", "|--:|--:|--:|--:|--:|--:|"}
	for _, c := range []struct {
		nodes float64
		name  string
		pods  string
	}{{5000, "5,000", "150,000"}, {65000, "65,000", "1,950,000"}} {
		flips = append(flips, fmt.Sprintf("| %s | %s | %s | %s | %s |", c.name,
			bytesText(c.nodes*binary[10]), bytesText(c.nodes*binary[100]), bytesText(c.nodes*delta), bytesText(c.nodes/100*binary[100])))
		const podsOfANode, changesOfAPod, day = 30, 4, 24 * 60 * 60
		pods := podsOfANode * c.nodes
		changes := pods * changesOfAPod / day
		days = append(days, fmt.Sprintf("| %s | %s | %.0f | %s/s | %s/s | %s |", c.name, c.pods, changes,
			bytesText(changes*c.nodes*binary[10]), bytesText(changes*binary[10]), bytesText(pods/10*binary[10])))
	}
	expect(append(flips, "")...)
	expect(append(days, "")...)
	expect(fmt.Sprintf("saves a factor of %.0f with slices of 10, and of %.0f with slices of 100", binary[10]/delta, 10*math.Round(binary[100]/delta/10)))
	expect(fmt.Sprintf("leave the API servers %s of a flip", bytesText(650*delta)))
}
