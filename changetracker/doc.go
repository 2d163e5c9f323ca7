// Package changetracker turns Services and EndpointSlices, as informers deliver them, into one
// immutable State per IP family and a Delta. The Delta is consumed only when the receiver reports
// success, as a whole or in parts. It is for who knows Services by events and has a data plane of its own; with a driver
// too, take package proxier.
//
// It is for programs with their own data plane; package proxier uses it internally. It does no
// I/O, starts no goroutine, does not need client-go and builds on all platforms. All methods
// of the trackers may be called concurrently.
package changetracker
