// Package changetracker turns Services and EndpointSlices, as any informer
// delivers them, into one immutable State per IP family and a Delta that is
// consumed only when the receiver says so.
//
// It does no I/O and starts no goroutine. All methods of the trackers may be
// called from several goroutines at once.
package changetracker
