package pause

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestForEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		start := time.Now()
		whole, cut := For(ctx, 20*time.Second), For(ctx, time.Hour)
		if took := time.Since(start); !whole || cut || took != time.Minute {
			t.Errorf("For = %t, then %t when its context ends first, after %v; want true and false after a minute", whole, cut, took)
		}
	})
}
