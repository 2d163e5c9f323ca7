// Package desired decides what a Service means for packets: its frontends, the endpoints behind
// each of them, which sources are masqueraded, which sources a source range admits, and what
// happens without endpoints. It is for who writes an engine, or programs a data plane by trackers
// alone.
//
// Resolve is pure and handles one service port. Every engine programs the kernel from a
// Service of this package and makes no decisions of its own. If several service ports have one
// frontend, a Resolved decides which one gets it, and an Updater turns the Deltas of a tracker
// into Updates for an engine.
//
// Use it together with package changetracker to find out what the Services of a cluster do, or
// for a data plane that package proxier does not suit. It builds on all platforms.
package desired
