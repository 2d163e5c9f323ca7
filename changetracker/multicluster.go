package changetracker

import (
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Labels of the EndpointSlices that a multi-cluster services controller imports (KEP-1645).
const (
	// LabelServiceImport names the ServiceImport that a slice belongs to. A slice that also
	// names a Service, by kubernetes.io/service-name, belongs only to that Service.
	LabelServiceImport = "multicluster.kubernetes.io/service-name"
	// LabelSourceCluster names the cluster that runs the slice's endpoints.
	LabelSourceCluster = "multicluster.kubernetes.io/source-cluster"
)

// ImportedService is the name under which the trackers store a ServiceImport. It differs from
// the Service of the same name, which is the cluster's own: no Service of the API has a dot in
// its name (RFC 1035). Package informer makes these Services.
func ImportedService(serviceImport types.NamespacedName) types.NamespacedName {
	return types.NamespacedName{Namespace: serviceImport.Namespace, Name: serviceImport.Name + ".clusterset"}
}

// serviceOf returns the Service that a slice belongs to. Its Name is empty if there is none.
func serviceOf(slice *discovery.EndpointSlice) types.NamespacedName {
	if name := slice.Labels[discovery.LabelServiceName]; name != "" {
		return types.NamespacedName{Namespace: slice.Namespace, Name: name}
	}
	if name := slice.Labels[LabelServiceImport]; name != "" {
		return ImportedService(types.NamespacedName{Namespace: slice.Namespace, Name: name})
	}
	return types.NamespacedName{}
}

// qualified returns the name under which the trackers store a node of another cluster. No
// Kubernetes node has a slash in its name (RFC 1123).
func qualified(cluster, node string) string {
	if cluster == "" || node == "" {
		return node
	}
	return cluster + "/" + node
}
