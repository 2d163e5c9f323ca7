// Package proxier is what all engines share: the Provider that an embedding
// program feeds with events, and the driver that turns them into Updates for an
// Engine.
//
// A program that takes a ready engine calls New of that engine's package, with the
// Config and the Deps of this one, and gets a *Proxier. A program with a data plane of
// its own implements Engine and calls New here: events are tracked
// for it, rate-limited and retried, and Status tells. Package hybrid makes
// one Engine of several.
//
// This package programs no kernel itself, and builds everywhere.
package proxier
