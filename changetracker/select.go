package changetracker

// Selection is the outcome of Select: which endpoints the traffic of a service
// port may go to.
type Selection struct {
	// Cluster are the endpoints for traffic under policy Cluster, and for pods
	// and the node itself under externalTrafficPolicy Local. Nil when no frontend
	// uses them.
	Cluster []Endpoint
	// Local are the endpoints for traffic under policy Local. Nil when no
	// frontend uses them.
	Local []Endpoint
	// All is the union of both, in the order of the input.
	All []Endpoint
	// Any says that at least one endpoint somewhere could take traffic. With an
	// empty Local it is what tells "drop" from "reject".
	Any bool
}
