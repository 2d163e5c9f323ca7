// Package spctl is a command line for running proxies: it shows what package debughttp
// serves, as tables for operators or as JSON and YAML for scripts. [New] returns a
// command that is a program by itself, or a subcommand of another one.
//
//	services [TEXT]              Services, one row for each service port
//	get NAMESPACE/NAME           one Service with its frontends and endpoints
//	explain SOURCE DESTINATION   the verdict on a packet, and the reasons
//	status                       families, failures and conditions
//	syncs                        the last syncs
//	watch [NAMESPACE/NAME]       changes, as they are programmed
//
// # Where it connects
//
// --address is the URL of a debughttp.Handler: http://127.0.0.1:10290, with the path of the
// mount point if there is one, or unix:///run/serviceplane/debug.sock for a handler that
// listens on a unix socket.
//
// # Output
//
// --output is table, json or yaml. JSON and YAML have the fields that package debughttp
// documents, and what newer versions add to them. Tables are for people: they may change.
// Everything goes to the command's standard output. The context of the command ends every
// request.
package spctl
