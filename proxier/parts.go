package proxier

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
)

// parts are what Run runs beside the syncs. One that ends before Run makes a condition.
type parts struct {
	p       *Proxier
	ctx     context.Context //nolint:containedctx // of all parts
	running sync.WaitGroup
	mu      sync.Mutex // guards errs
	errs    []error
}

func (s *parts) run(does string, part func() error) {
	s.running.Go(func() {
		err := part()
		early := s.ctx.Err() == nil
		if err != nil {
			err = fmt.Errorf("%s: %w", does, err)
		} else if early {
			err = fmt.Errorf("%s: ended without an error", does)
		}
		s.mu.Lock()
		s.errs = append(s.errs, err)
		s.mu.Unlock()
		if !early {
			return
		}
		s.p.log.Error("a part of the proxy has ended, what it does is missing: restart the process", zap.Error(err))
		s.p.mu.Lock()
		defer s.p.mu.Unlock()
		s.p.ended = append(s.p.ended, Condition{Type: ConditionEnded, Since: time.Now(), Message: err.Error() + ": restart the process"})
	})
}

// wait waits until all have ended, and returns their errors.
func (s *parts) wait() error {
	s.running.Wait()
	return errors.Join(s.errs...)
}
