// Package runner calls one function at a limited rate: requests coalesce, a token bucket limits the
// rate, failures are retried with a backoff, and the function also runs periodically, or goes on at once. It is for
// loops of programs; the driver has one already.
//
// It suits any function that brings something to a desired state, and does not depend on
// Services. It imports the standard library only and builds on all platforms.
package runner
