package packettrace

import "context"

// TraceWithoutOwner is Trace on a kernel that does not know the flag: no kernel knows this one.
func TraceWithoutOwner(ctx context.Context, o Options) (Result, error) {
	return trace(ctx, o.withDefaults(), 1<<31)
}
