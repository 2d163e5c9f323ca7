package nodeproxy

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// The removal of other modes is tried at least once a minute until it succeeds, and each reason is logged once.
func TestRemovalOfOtherModesIsTriedUntilItSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		began, failures := time.Now(), map[time.Duration]string{0: "busy", time.Second: "busy", 3 * time.Second: "no memory", 7 * time.Second: "no memory"}
		untilDone(t.Context(), zap.New(core), func() error {
			if reason, fails := failures[time.Since(began)]; fails {
				return errors.New(reason)
			}
			return nil
		})
		var lines []string
		for _, l := range logs.All() {
			lines = append(lines, l.Message)
		}
		const failed = "rules of other modes are not removed, will be retried"
		if want := []string{failed, failed, "rules of other modes are removed now"}; time.Since(began) != 15*time.Second || !slices.Equal(lines, want) {
			t.Errorf("after %v: logged %q, want %q after 15s", time.Since(began), lines, want)
		}
		ctx, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		attempts := 0
		untilDone(ctx, zap.NewNop(), func() error {
			attempts++
			return errors.New("busy")
		})
		if attempts < 60 || attempts > 66 {
			t.Errorf("%d attempts in an hour, want about one a minute, and the end with the context", attempts)
		}
	})
}
