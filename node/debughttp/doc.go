// Package debughttp shows the state of a running proxy: it is an [http.Handler] with one page, and
// the JSON behind it. It is for programs whose operators ask why a packet does not arrive.
//
// The page shows
//
//   - whether each IP family is programmed, what failed, and other conditions that need
//     an operator's attention;
//   - the Services, with filters, a search by name, VIP, node port or endpoint address, and a
//     verdict on each;
//   - a Service with its frontends and endpoints, what changes in them, and, if the engine has
//     them, its rules and the counts of its connections;
//   - the last syncs, with the duration of each stage;
//   - the verdict on a packet, and the reasons.
//
// Its URL holds what it shows.
//
// All of it is what is programmed: a pending change is not shown. The Handler works with
// a *proxier.Proxier of any engine.
//
// # Keep it inside
//
// The Handler does not authenticate clients. It shows the names and addresses of all
// Services and pods, and the proxy's errors; it changes nothing, except with the option
// Tracer. Serve it only where operators can reach it, on a loopback address or behind an
// authenticating proxy. Do not make it reachable from outside, nor from pods.
//
// Browsers must not give the responses to other sites, and such a site can resolve its
// own name to the server's address (DNS rebinding). So the Handler accepts only requests
// whose Host is an IP address, localhost or one of Hosts. KnownHosts protects any other
// handler in the same way.
//
// # JSON
//
// The paths are relative to where the Handler is mounted; the method is GET:
//
//	status?limit=                      families, conditions, problems and the node
//	services?q=&namespace=&filter=&limit=&offset=
//	                                   Services that match, and how many have each filter
//	namespaces                         the namespaces, with the number of Services
//	service?namespace=&name=           one Service with all details
//	syncs                              the last syncs, oldest first
//	explain?protocol=&source=&destination=&origin=&interface=
//	                                   the verdict on a packet
//	state?namespace=                   all Services with their endpoints, for comparison
//	report                             status, syncs and all Services with all details, as a file
//	counts?namespace=&name=&limit=     the numbers of new connections of service ports, and of
//	                                   their endpoints, and their traffic; most connections first
//	watch                              a line of JSON for each change of a service port
//	rules?namespace=&name=             what the engine programs for one Service
//	programmed?namespace=&name=&services=&endpointslices=&endpoint=
//	                                   up to which resourceVersions all is programmed; with a
//	                                   Service and versions, whether its change is
//	verify                             the differences between the kernel and what is programmed
//	trace?…&packets=&timeout=&send=&netns=
//	                                   POST, and only with the option Tracer: what happens to a
//	                                   real packet; the first parameters are those of explain
//
// Services come sorted by namespace and name, with numbers in them by value. With q, Services that
// have it as namespace/name, name, VIP, node port or endpoint address come first, then the
// ones that begin with it, then the ones that contain it; q may also be a VIP or endpoint with its port.
// filter is a list, separated by commas, of what a Service must have on some service port:
//
//	failed          the last sync could not program it
//	no-endpoints    frontends that reject, because nothing can take the connections
//	dropping        frontends that drop what comes from outside, because of policy Local or
//	                because no source is admitted
//	lost            a frontend that belongs to another Service
//	ejected         an endpoint that an Override ejects
//	external        a node port, load balancer IP or external IP
//	affinity        session affinity
//	balancing       a load balancing policy other than random
//
// The verdict on a Service is the first of these that is true: failed, no frontends,
// no endpoints (all frontends reject), drops (none forwards, some drop), partly rejects,
// partly drops, works.
//
// The first list makes an index, of about 2 kB for each Service; later ones bring it up to date.
// It is dropped after five minutes without a request.
//
// limit is 100 by default, and at most 1000. Times are in RFC 3339, durations in seconds;
// unknown fields, and fields that do not apply, are omitted. An error is {"error": "…"}:
// 400 for an invalid parameter, which the text names, 404 for a Service that is not
// programmed, and 503 from explain while nothing is programmed in the packet's IP
// family, and 501 from counts if connections are not counted. New versions may add fields.
//
// verify reads the whole kernel, and syncs wait meanwhile; a second request gets 503 with
// Retry-After.
//
// watch does not end until the client goes away, and has no past changes. It compares States
// every 200 ms, so that it shows what is left of several changes within that time. Its first
// line, and one every 30 s, has the type watching; the others added, changed or removed.
package debughttp
