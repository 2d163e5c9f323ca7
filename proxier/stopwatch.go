package proxier

import "time"

// stopwatch measures the stages of a sync.
type stopwatch struct {
	last   time.Time // when the last stage ended
	stages []Stage
}

// lap ends a stage that started when the previous one ended.
func (w *stopwatch) lap(name string) {
	now := time.Now()
	w.stages = append(w.stages, Stage{Name: name, Started: w.last, Duration: now.Sub(w.last)})
	w.last = now
}

// split ends two stages. The second one took the given time, at most all of the time since
// the previous stage. The two may have alternated.
func (w *stopwatch) split(first, second string, took time.Duration) {
	now := time.Now()
	took = min(took, now.Sub(w.last))
	border := now.Add(-took)
	w.stages = append(w.stages,
		Stage{Name: first, Started: w.last, Duration: border.Sub(w.last)},
		Stage{Name: second, Started: border, Duration: took})
	w.last = now
}
