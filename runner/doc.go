// Package runner calls one function no more often than is good for it: requests
// coalesce, a token bucket limits the rate, failures are retried with growing
// pauses, and the function runs once in a while even if nobody asks.
//
// It suits any function that brings something to a wanted state, and knows nothing of
// Services. It needs the standard library only and builds everywhere.
package runner
