package spctl

import (
	"encoding/json"
	"fmt"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/internal/answers"
)

func (a *app) syncs() *cobra.Command {
	return plain("syncs", "List the last syncs, oldest first", "", func(c *cobra.Command) error {
		return a.show(c, "syncs", url.Values{}, (*printer).syncs)
	})
}

func kind(s *answers.Sync) string {
	switch {
	case s.Repair:
		return "repair"
	case s.Full:
		return "full"
	default:
		return "partial"
	}
}

func (w *printer) syncs(content json.RawMessage) error {
	answer, err := decode[answers.Syncs](content)
	if err != nil {
		return err
	}
	if len(answer.Syncs) == 0 {
		w.line("no syncs")
	}
	rows(w, "STARTED FAMILY KIND DURATION KERNEL CHANGES FAILED WRITES FLOWS-DELETED ERROR", answer.Syncs, func(s answers.Sync) []string {
		return []string{
			s.Started.Format(time.RFC3339), s.Family, kind(&s), short(s.DurationSeconds), short(s.KernelSeconds), fmt.Sprint(s.Changes),
			fmt.Sprint(s.Failed), fmt.Sprint(s.Writes), fmt.Sprint(s.FlowsDeleted), s.Error,
		}
	})
	return nil
}

// short returns seconds as a duration of three digits.
func short(seconds float64) string {
	const units = 1000
	d := time.Duration(seconds * float64(time.Second))
	precision := time.Duration(1)
	for precision*units < d {
		precision *= 10
	}
	return d.Round(precision).String()
}
