package spctl

import (
	"encoding/json"
	"fmt"
	"net/url"
	"time"

	"github.com/spf13/cobra"
)

// syncsAnswer has the fields of debughttp's syncs that tables show.
type syncsAnswer struct {
	Syncs []sync `json:"syncs"`
}

type sync struct {
	Family   string    `json:"family"`
	Started  time.Time `json:"started"`
	Duration float64   `json:"durationSeconds"`
	Kernel   float64   `json:"kernelSeconds"`
	Full     bool      `json:"full"`
	Repair   bool      `json:"repair"`
	Changes  int       `json:"changes"`
	Failed   int       `json:"failed"`
	Writes   int       `json:"writes"`
	Flows    int       `json:"flowsDeleted"`
	Error    string    `json:"error"`
}

func (a *app) syncs() *cobra.Command {
	return &cobra.Command{
		Use:               "syncs",
		Short:             "List the last syncs, oldest first",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.show(c, "syncs", url.Values{}, (*printer).syncs)
		},
	}
}

func (s *sync) kind() string {
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
	answer, err := decode[syncsAnswer](content)
	if err != nil {
		return err
	}
	if len(answer.Syncs) == 0 {
		w.line("no syncs")
	}
	rows(w, "STARTED FAMILY KIND DURATION KERNEL CHANGES FAILED WRITES FLOWS-DELETED ERROR", answer.Syncs, func(s sync) []string {
		return []string{
			s.Started.Format(time.RFC3339), s.Family, s.kind(), short(s.Duration), short(s.Kernel), fmt.Sprint(s.Changes),
			fmt.Sprint(s.Failed), fmt.Sprint(s.Writes), fmt.Sprint(s.Flows), s.Error,
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
