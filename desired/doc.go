// Package desired decides what a Service means for packets: which frontends it
// has, which endpoints answer each of them, what is masqueraded, whom a source
// range keeps out, and what happens when nobody can answer.
//
// Resolve is pure and looks at one service port only. Every engine renders its
// kernel objects from a Service of this package and decides nothing by itself.
// Several service ports may ask for one frontend: a Resolved knows who gets it, and an
// Updater makes Updates for an engine out of what a tracker says.
//
// Take it together with package changetracker, to ask what a cluster's Services
// would do, or for a data plane that package proxier does not suit. It builds
// everywhere.
package desired
