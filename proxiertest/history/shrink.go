package history

import (
	"context"
	"slices"
	"time"
)

// shrink returns the shortest part of a history that it finds to fail too, within a time. It
// leaves out half of the steps, then quarters, and so on, but never the last, which settles.
func shrink(ctx context.Context, steps []Event, within time.Duration, fails func(context.Context, []Event) bool) []Event {
	deadline := time.Now().Add(within)
	for size := len(steps) / 2; size > 0; size /= 2 {
		for from := 0; from+size < len(steps); {
			if time.Now().After(deadline) || ctx.Err() != nil {
				return steps
			}
			shorter := slices.Concat(steps[:from], steps[from+size:])
			if fails(ctx, shorter) {
				steps = shorter
			} else {
				from += size
			}
		}
	}
	return steps
}
