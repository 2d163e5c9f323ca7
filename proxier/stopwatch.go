package proxier

import "time"

// stopwatch divides a sync into its stages.
type stopwatch struct {
	last   time.Time // when the last stage ended
	stages []Stage
}

// lap ends a stage that began when the one before it ended.
func (w *stopwatch) lap(name string) {
	now := time.Now()
	w.stages = append(w.stages, Stage{Name: name, Started: w.last, Duration: now.Sub(w.last)})
	w.last = now
}

// split ends two stages: the second one took as long as given, or all there is.
// They may have taken turns.
func (w *stopwatch) split(first, second string, took time.Duration) {
	now := time.Now()
	took = min(took, now.Sub(w.last))
	border := now.Add(-took)
	w.stages = append(w.stages,
		Stage{Name: first, Started: w.last, Duration: border.Sub(w.last)},
		Stage{Name: second, Started: border, Duration: took})
	w.last = now
}
