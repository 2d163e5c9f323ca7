package packettrace

import "context"

// TraceWithoutOwner is Trace as before Linux 5.12.
func TraceWithoutOwner(ctx context.Context, o Options) (Result, error) {
	return trace(ctx, o.withDefaults(), 0)
}
