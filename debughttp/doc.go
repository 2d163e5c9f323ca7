// Package debughttp is a window into a running proxy: an [http.Handler] with one
// plain page, and the JSON that the page is made from.
//
// The page shows
//
//   - whether each IP family is programmed, what failed and what else an operator
//     should look at;
//   - the Services, found by name, VIP, node port or endpoint address, and of one of
//     them all frontends and endpoints, as they change;
//   - the last syncs, with how long each part of them took;
//   - what becomes of a packet, and why.
//
// It shows what is programmed: a change that waits for its sync is not there yet. It
// needs no more than a *proxier.Proxier, whatever its engine, and builds everywhere.
//
// # Keep it inside
//
// The Handler asks nobody who they are, and tells the names and addresses of all
// Services and pods, and what the proxy has trouble with. Serve it at an address that
// only operators reach: a loopback address, or behind something that authenticates.
// It must not be reachable from outside, and neither from pods. It changes nothing.
// A browser shows the answers to no other site. For that the Handler answers only
// requests whose Host is an IP address, localhost or one of Hosts: another site could
// have its own name resolve to the server's address. KnownHosts does so for any handler.
//
// # JSON
//
// Each is got with GET, relative to where the Handler is mounted:
//
//	status?limit=                      families, conditions, problems and the node
//	services?q=&limit=&offset=         Services that have the text q in them, by name
//	service?namespace=&name=           one Service in full
//	syncs                              the last syncs, oldest first
//	explain?protocol=&source=&destination=&origin=&interface=
//	                                   what becomes of a packet
//
// limit is 100 unless given, and at most 1000. Times are RFC 3339, durations are
// numbers of seconds, and what is not known or does not apply is left out. An error is
// {"error": "…"}: 400 for a parameter that is wrong, which the text names, 404 for a
// Service that is not programmed, and 503 for explain as long as nothing is programmed
// in the packet's IP family. The fields may grow in number.
package debughttp
