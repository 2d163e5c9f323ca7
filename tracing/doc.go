// Package tracing shows what a proxy does as OpenTelemetry traces: one trace for
// each sync of an IP family, with a span for each of its stages.
//
//	sync                    from the arrival of the oldest change to the end
//	├ queued                it waits for the rate limit, or for a sync that runs
//	├ tracker               what arrived becomes a state and what differs
//	├ resolve               what that means for packets
//	├ plan                  what the kernel needs
//	├ apply                 the kernel takes it
//	├ conntrack             stale flows are forgotten
//	└ health                health check node ports are told
//
// The spans are made when a sync has ended, from its report: a proxy without
// tracing does nothing for it.
package tracing
