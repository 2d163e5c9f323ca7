// Package changetracker turns Services and EndpointSlices, as any informer
// delivers them, into one immutable State per IP family and a Delta that is
// consumed only when the receiver says so.
//
// It is for programs with a data plane of their own; package proxier has it inside.
// It does no I/O, starts no goroutine, needs no client-go and builds everywhere. All
// methods of the trackers may be called from several goroutines at once.
package changetracker
