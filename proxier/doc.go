// Package proxier holds what all engines share: the Provider that an embedding program feeds with
// events, and the driver that turns events into Updates for an Engine. Every program with an engine
// needs it, and who writes one.
//
// A program that uses an engine of this library calls New of that engine's package, with
// the Config and the Deps of this one, and gets a *Proxier. A program with a data plane of
// its own implements Engine and calls New here: the Proxier tracks events, limits the rate
// of syncs, retries failures, and reports its Status. Package hybrid combines several
// Engines into one.
//
// This package does not access the kernel itself, and builds on all platforms.
package proxier
