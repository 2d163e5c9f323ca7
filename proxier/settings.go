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

// asked are conditions that somebody finds when asked, again and again.
type asked struct {
	find func(ctx context.Context) []Condition
	log  *zap.Logger
	// message is logged for each new condition.
	message string
	// always asks also while there is none.
	always bool

	mu    sync.Mutex // guards all below
	found []Condition
}

func (a *asked) ask(ctx context.Context) {
	conditions := a.find(ctx)
	a.mu.Lock()
	before := a.found
	for i := range conditions {
		if j := slices.IndexFunc(before, conditions[i].same); j >= 0 {
			conditions[i].Since = before[j].Since
		}
	}
	a.found = conditions
	a.mu.Unlock()
	for i := range conditions {
		if !slices.ContainsFunc(before, conditions[i].same) {
			a.log.Warn(a.message, zap.String("reason", conditions[i].Message))
		}
	}
}

// The pauses between two questions.
const firstQuestion, longestQuestion = time.Second, 30 * time.Second

// askAgain asks until there is no condition any more, or until ctx ends.
func (a *asked) askAgain(ctx context.Context) {
	for d := firstQuestion; (a.always || len(a.conditions()) > 0) && pause.For(ctx, d); d = min(2*d, longestQuestion) {
		a.ask(ctx)
	}
}

func (a *asked) conditions() []Condition {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.found)
}

func restore(ctx context.Context, s Settings) error {
	if s == nil {
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
