// Package spctl is a command line for running proxies: it shows what package debughttp
// serves, as tables for operators or as JSON and YAML for scripts. [New] returns a
// command that is a program by itself, or a subcommand of another one.
//
//	services [TEXT]              Services, one row for each service port
//	get NAMESPACE/NAME           one Service with its frontends and endpoints
//	explain SOURCE DESTINATION   the verdict on a packet, and the reasons
//	status                       families, failures and conditions
//	syncs                        the last syncs
//	state                        everything that is programmed, for diff
//	diff [FILE…]                 what differs between files, proxies and nodes
//	watch [NAMESPACE/NAME]       changes, as they are programmed
//	verify                       the kernel, compared with what should be programmed
//	rules NAMESPACE/NAME         what the engine programs for one Service
//	wait NAMESPACE/NAME          until a change of a Service is programmed
//	counts [NAMESPACE/NAME]      connections, packets and bytes
//	trace SOURCE DESTINATION     the way of one real packet, compared with explain
//
// A proxy that does not serve what a subcommand needs is an error of that subcommand.
//
// # Where it connects
//
// --address is the URL of a debughttp.Handler: http://127.0.0.1:10290, with the path of the
// mount point if there is one, or unix:///run/serviceplane/debug.sock for a handler that
// listens on a unix socket.
//
// With Options.Nodes, the command shows several nodes side by side, as a kubectl plugin does.
//
// # Exit status
//
// [ExitStatus] is, for every subcommand:
//
//	0  it did its work, and what it compares agrees
//	1  verify or diff found a difference, trace a packet that does not go as explained, or wait
//	   a proxy that has not programmed the change in time
//	2  it could not do its work: the arguments are wrong, the proxy or one of several nodes does
//	   not answer, it has no such Service, or trace followed no packet
//
// # Output
//
// --output is table, json or yaml. JSON and YAML have the fields that package debughttp
// documents, and what newer versions add to them. Tables are for people: they may change.
// Everything goes to the command's standard output. The context of the command ends every
// request.
package spctl
