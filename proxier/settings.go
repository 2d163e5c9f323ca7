package proxier

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/internal/pause"
)

// appliedSettings applies Settings, and keeps the conditions of those that failed.
type appliedSettings struct {
	Settings // nil: none
	log      *zap.Logger

	mu     sync.Mutex // guards all below
	failed []Condition
}

func (s *appliedSettings) apply(ctx context.Context) {
	if s.Settings == nil {
		return
	}
	conditions := s.Apply(ctx)
	s.mu.Lock()
	before := s.failed
	for i := range conditions {
		if j := slices.IndexFunc(before, conditions[i].same); j >= 0 {
			conditions[i].Since = before[j].Since
		}
	}
	s.failed = conditions
	s.mu.Unlock()
	for i := range conditions {
		if !slices.ContainsFunc(before, conditions[i].same) {
			s.log.Warn("kernel setting is not applied, will be retried", zap.String("reason", conditions[i].Message))
		}
	}
}

// The pauses between tries to apply settings.
const firstSettingsPause, longestSettingsPause = time.Second, 30 * time.Second

// retry applies the settings again until none fails.
func (s *appliedSettings) retry(ctx context.Context) {
	for d := firstSettingsPause; len(s.conditions()) > 0 && pause.For(ctx, d); d = min(2*d, longestSettingsPause) {
		s.apply(ctx)
	}
}

func (s *appliedSettings) conditions() []Condition {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.failed)
}

func (s *appliedSettings) restore(ctx context.Context) error {
	if s.Settings == nil {
		return nil
	}
	if err := s.Restore(ctx); err != nil {
		return fmt.Errorf("restore kernel settings: %w", err)
	}
	return nil
}

// same reports whether two conditions differ in Since only.
func (c *Condition) same(o Condition) bool {
	return c.Type == o.Type && c.Family == o.Family && c.Message == o.Message
}
