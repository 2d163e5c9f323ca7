package spctl

import (
	"encoding/json"
	"strings"

	"github.com/spf13/cobra"
)

// rulesAnswer is debughttp's rules.
type rulesAnswer struct {
	Families []struct {
		Family string `json:"family"`
		Text   string `json:"text"`
	} `json:"families"`
}

func (a *app) rules() *cobra.Command {
	return &cobra.Command{
		Use:               "rules NAMESPACE/NAME",
		Short:             "Print what the engine programs for one Service",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeServices,
		RunE: func(c *cobra.Command, args []string) error {
			query, err := serviceQuery(args[0])
			if err != nil {
				return err
			}
			return a.show(c, "rules", query, (*printer).rules)
		},
	}
}

func (w *printer) rules(content json.RawMessage) error {
	answer, err := decode[rulesAnswer](content)
	if err != nil {
		return err
	}
	for i, f := range answer.Families {
		if i > 0 {
			w.line("")
		}
		w.line("# " + f.Family)
		for line := range strings.Lines(f.Text) {
			w.line(oneLine(strings.TrimSuffix(strings.ReplaceAll(line, "\t", "    "), "\n")))
		}
	}
	return nil
}
